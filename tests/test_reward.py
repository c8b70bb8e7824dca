"""reward.py: tables of what people write, Video-R1's own results, and scoring that hangs, dies or raises."""

import itertools
import json
import math
import time

import pytest

from reward import Question, RewardConfig, Scorer, extract_answer, parse_number, reward, well_formed

ANIMALS = ["A. cat", "B. dog", "C. a bird", "D. None of the above"]


def score(kind, solution, answer, options=(), **config):
    question = Question("", list(options), solution, kind)
    return reward(question, f"<answer>{answer}</answer>", True, RewardConfig(**config))


# ------------------------------------------------------------------------------------------ form


@pytest.mark.parametrize(
    "text,answer",
    [
        ("<answer>A</answer>", "A"),
        ("<think>…</think>\n<answer> A\n</answer>\n", "A"),
        ("I say <answer>A</answer>.", "A"),
        ("<answer></answer>", ""),
        ("A", None),
        ("<answer>A", None),
        ("A</answer>", None),
        ("</answer>A<answer>", None),
        ("<answer>A</answer><answer>A</answer>", None),
        ("<answer>A</answer> or <answer>B</answer>", None),
        ("<answer><answer>A</answer></answer>", None),
        ("<answer>A</answer></answer>", None),
        ("<ANSWER>A</ANSWER>", None),
        ("", None),
    ],
)
def test_exactly_one_answer(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    "text,short,think",
    [
        ("<answer>A</answer>", True, False),
        (" <answer>A</answer>\n", True, False),
        ("<think>x</think><answer>A</answer>", False, True),
        ("\n<think>x\ny</think>\n\n<answer>A</answer>\n", False, True),
        ("Well. <answer>A</answer>", False, False),
        ("<answer>A</answer> so", False, False),
        ("<think>x<answer>A</answer></think>", False, False),
        ("<think>x</think><think>y</think><answer>A</answer>", False, False),
        ("<answer>A</answer><think>x</think>", False, False),
    ],
)
def test_form(text, short, think):
    assert well_formed(text, think=False) == short and well_formed(text, think=True) == think


def test_bonuses_add_up():
    question = Question("", ANIMALS, "B", "multiple choice")
    config = RewardConfig(format_weight=0.5, length_bonus=0.2, think=True)
    good = "<think>it barks</think><answer>B</answer>"
    assert reward(question, good, True, config, tokens=400) == pytest.approx(1.7)
    assert reward(question, good, True, config, tokens=100) == pytest.approx(1.5)
    assert reward(question, good.replace(">B<", ">A<"), True, config, tokens=400) == pytest.approx(0.5)
    assert reward(question, "<answer>B</answer>", True, config, tokens=400) == pytest.approx(1.2)
    assert reward(question, "B", True, config, tokens=400) == 0
    assert reward(question, good, False, config, tokens=400) == 0  # ran into the token limit


# ------------------------------------------------------------------------------------------ choices


@pytest.mark.parametrize(
    "answer,letter",
    [
        ("A", "A"), ("a", "A"), ("(A)", "A"), ("(a)", "A"), ("A.", "A"), ("A)", "A"), ("A:", "A"), (" A \n", "A"),
        ("**A**", "A"),
        ("A. cat", "A"), ("A) cat", "A"), ("(A) cat", "A"), ("A: Cat.", "A"), ("A. The cat", "A"), ("cat", "A"),
        ("Cat", "A"),
        ("\\text{A}", "A"), ("\\boxed{A}", "A"), ("$\\text{(A)}$", "A"), ("The answer is A", "A"),
        ("The answer is A.", "A"),
        ("Answer: A", "A"), ("Option A", "A"), ("The correct option is (A)", "A"), ("the answer is: A. cat", "A"),
        ("\uff21", "A"), ("\uff08A\uff09", "A"), ("‘A’", "A"),
        ("a bird", "C"), ("A bird", "C"), ("C. a bird", "C"), ("bird", "C"), ("None of the above", "D"), ("d", "D"),
        ("a cat and a dog", None), ("A or B", None), ("A, B", None), ("A and B", None), ("A. dog", None), ("AB", None),
        ("A B", None),
        ("a dog barks", None), ("A dog barks", None), ("E", None), ("E. fish", None), ("", None), ("?", None),
        ("Ä", None), ("答案是猫", None),
        ("A. cat, B. dog", None), ("not A", None), ("A) B) C) D)", None), ("A" * 10_000_000, None),
        ("(A)" + " " * 5000 + "x", None),
    ],
)  # fmt: skip
def test_choices(answer, letter):
    for option in "ABCD":
        assert score("multiple choice", option, answer, ANIMALS) == float(option == letter)


def test_choices_without_letters_or_options_and_text_as_solution():
    assert score("multiple choice", "B", "B. dog", ["cat", "dog"]) == 1
    assert score("multiple choice", "B", "dog", ["cat", "dog"]) == 1
    assert score("multiple choice", "B. dog", "B", ["A. cat", "B. dog"]) == 1
    assert score("multiple choice", "B", "(b)") == 1 and score("multiple choice", "B", "B. whatever") == 1
    letters = ["A. k", "B. a", "C. t"]  # options that are letters themselves
    assert score("multiple choice", "A", "A", letters) == 1 and score("multiple choice", "B", "B. a", letters) == 1
    assert score("multiple choice", "A", "a", letters) == score("multiple choice", "B", "a", letters) == 0
    with pytest.raises(ValueError, match="names none of the options"):
        score("multiple choice", "Z", "A", ANIMALS)


@pytest.mark.parametrize(
    "answer,right",
    [
        ("A, C", 1), ("C, A", 1), ("A and C", 1), ("a, c", 1), ("AC", 1), ("(A), (C)", 1), ("A. cat\nC. a bird", 1),
        ("A;C", 1),
        ("A", 0), ("A, B, C", 0), ("C", 0), ("none", 0), ("", 0), ("A, Z", 0), ("A C E", 0), ("all", 0),
    ],
)  # fmt: skip
def test_several_right_choices_need_exactly_those(answer, right):
    assert score("multiple select", "A, C", answer, ANIMALS[:3]) == right
    assert score("multiple select", "none", answer, ANIMALS[:3]) == float(answer == "none")


# ------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    "text,value,unit",
    [
        ("3", 3, ""), ("3.0", 3, ""), ("+3", 3, ""), ("-3", -3, ""), ("−3", -3, ""), ("–3", -3, ""), (".5", 0.5, ""),
        ("3.", 3, ""),
        ("1,000", 1000, ""), ("1,234,567.5", 1234567.5, ""), ("1 000", 1000, ""), ("1\u202f000", 1000, ""),
        ("1'000", 1000, ""),
        ("1_000", 1000, ""), ("3,5", 3.5, ""), ("1{,}000", 1000, ""),
        ("1/2", 0.5, ""), ("-3/4", -0.75, ""), ("1 1/2", 1.5, ""), ("½", 0.5, ""), ("2½", 2.5, ""),
        ("\\frac{1}{2}", 0.5, ""),
        ("\\dfrac{3}{4}", 0.75, ""), ("1⁄2", 0.5, ""),
        ("1e3", 1000, ""), ("1.5E-3", 0.0015, ""), ("1.5 × 10^3", 1500, ""), ("1.5 \\times 10^{3}", 1500, ""),
        ("2·10⁻³", 0.002, ""),
        ("10^6", 1e6, ""), ("10²", 100, ""), ("$5", 5, ""), ("€1,000", 1000, ""),
        ("3 cm", 3, "cm"), ("3cm", 3, "cm"), ("9.8 m/s^2", 9.8, "m/s^2"), ("20 °C", 20, "°C"),
        ("5 apples", 5, "apples"), ("5 µm", 5, "μm"),
        ("٣", 3, ""), ("３", 3, ""), ("３．５", 3.5, ""), ("४२", 42, ""),
        ("The answer is 7", 7, ""), ("x = 7", 7, ""), ("about 7", 7, ""), ("≈ 7", 7, ""), ("$7$", 7, ""),
        ("\\boxed{7}", 7, ""), ("7.", 7, ""),
    ],
)  # fmt: skip
def test_numbers_as_people_write_them(text, value, unit):
    number = parse_number(text)
    assert number is not None and list(number.values) == [pytest.approx(value)] and number.unit == unit


@pytest.mark.parametrize(
    "text",
    ["", "nan", "NaN", "inf", "-inf", "infinity", "three", "1e999", "1/0", "3 or 4", "3, 4", "3 4", "3-4", "1,00,0",
     "between 3 and 4", "3 = 4", "--3", "3;4", "no 3", "9" * 10_000_000, "0x10", "3…4", "十"],
)  # fmt: skip
def test_what_is_no_number(text):
    assert parse_number(text) is None
    assert score("numerical", "3", text) == 0 and score("regression", "3", text) == 0


@pytest.mark.parametrize(
    "solution,answer,right",
    [
        ("3", "3.0", 1), ("3.0", "3", 1), ("1000", "1,000", 1), ("0.5", "1/2", 1), ("3", "3 cm", 1), ("3 cm", "3", 1),
        ("3 cm", "3 m", 0),
        ("50", "50%", 1), ("0.5", "50%", 1), ("50%", "0.5", 1), ("50%", "50", 1), ("50", "0.5", 0), ("5%", "50%", 0),
        ("3.14159", "3.14", 1), ("3.14159", "3.1", 0), ("3.14", "3.15", 0), ("0.001", "0.004", 0), ("0", "0.004", 0),
        ("0", "0", 1),
        ("-3", "3", 0), ("-3", "−3", 1), ("1000000", "1000001", 0), ("1e6", "1,000,000", 1), ("2.5", "2½", 1),
        ("12", "21", 0),
    ],
)  # fmt: skip
def test_numerical(solution, answer, right):
    assert score("numerical", solution, answer) == right


@pytest.mark.parametrize(
    "answer,expected",
    [("10", 1), ("9", 0.9), ("11", 0.9), ("25", 0), ("-10", 0), ("nan", 0), ("10 m", 1), ("1e1", 1)],
)
def test_regression(answer, expected):
    assert score("regression", "10", answer) == pytest.approx(expected)


def test_regression_around_zero_is_finite():
    assert score("regression", "0", "0") == 1 and score("regression", "0", "1") == 0


# ------------------------------------------------------------------------------------------ text


@pytest.mark.parametrize(
    "solution,answer,expected",
    [
        ("STOP AHEAD", "STOP AHEAD", 1), ("STOP AHEAD", " STOP\nAHEAD ", 1), ("STOP AHEAD", "STOP", 0.5),
        ("STOP AHEAD", "STOP AHED", 0.5),
        ("STOP AHEAD", "stop ahead", 0), ("STOP", "GO AND RUN", 0), ("STOP", "", 0),
        ("出口はあちら", "出口はこちら", 5 / 6),
        ("ＡＢ", "AB", 1),
        ("STOP", "STOP " * 2_000_000, 0),
    ],
)  # fmt: skip
def test_ocr_is_one_minus_the_word_error_rate(solution, answer, expected):
    assert score("OCR", solution, answer) == pytest.approx(expected)


def lcs(a, b):
    return 0 if not a or not b else 1 + lcs(a[:-1], b[:-1]) if a[-1] == b[-1] else max(lcs(a[:-1], b), lcs(a, b[:-1]))


@pytest.mark.parametrize(
    "answer", ["a red ball rolls left", "red ball", "the ball left", "green", "ball red rolls left left"]
)
def test_free_form_is_the_mean_of_three_rouges(answer):
    solution = "the red ball rolls to the left"
    a, b = (["red", "ball", "rolls", "to", "left"], [w for w in answer.split() if w not in ("a", "the")])

    def f(overlap, n, m):
        return 2 * overlap / (n + m) if n + m else 0

    unigrams = sum(min(a.count(w), b.count(w)) for w in set(a))
    pairs = [list(itertools.pairwise(x)) for x in (a, b)]
    bigrams = sum(min(pairs[0].count(w), pairs[1].count(w)) for w in set(pairs[0]))
    rouge = [f(unigrams, len(a), len(b)), f(bigrams, len(pairs[0]), len(pairs[1])), f(lcs(a, b), len(a), len(b))]
    assert score("free-form", solution, answer) == pytest.approx(sum(rouge) / 3)


def test_free_form_of_one_word_and_of_other_scripts():
    assert [score("free-form", "cat", answer) for answer in ("cat", "The cat.", "dog")] == [1, 1, 0]
    assert score("free-form", "кошка спит", "кошка спит") == 1 and score("free-form", "猫在睡觉", "猫在睡觉") == 1
    assert 0 < score("free-form", "猫在睡觉", "狗在睡觉") < 1
    assert score("free-form", "cat", "") == 0 and score("free-form", "cat", "cat " * 3_000_000) == 0


@pytest.mark.parametrize(
    "solution,answer,right",
    [
        ("yes", "Yes", 1), ("yes", "yes.", 1), ("yes", "no", 0), ("rubber", "the rubber", 1), ("rubber", "'rubber'", 1),
        ("3", "3.0", 1),
        ("blue cube", "blue  cube", 1), ("blue cube", "cube blue", 0), ("a", "a", 1), ("a", "the", 0), ("", "x", 0),
        ("Straße", "STRASSE", 1),
        ("5", "5 apples", 0), ("yes", "yes or no", 0),
    ],
)  # fmt: skip
def test_exact_text(solution, answer, right):
    assert score("exact", solution, answer) == right


@pytest.mark.parametrize(
    "solution,answer,right",
    [
        ("\\frac{1}{2}", "0.5", 1), ("\\frac{1}{2}", "1/2", 1), ("(x+1)^2", "x^2+2x+1", 1),
        ("2\\sqrt{2}", "$\\sqrt{8}$", 1), ("42", "\\boxed{42}", 1),
        ("(1,2)", "(1, 2)", 1), ("(1,2)", "(2,1)", 0), ("\\{1,2\\}", "{2, 1}", 1), ("\\text{east}", "east", 1),
        ("10000", "10,000", 1), ("5", "x=5", 1),
        ("\\pi", "3.14", 0), ("3", "4", 0), ("3", "3 or 4", 0), ("3", "", 0), ("3", "\\frac{", 0), ("3", "三", 0),
        ("3", "3" * 10_000_000, 0),
        ("nan", "7", 0), ("70^\\circ", "70", 1), ("\\frac{3}{4}\\pi", "0.75\\pi", 1),
    ],
)  # fmt: skip
def test_math(solution, answer, right):
    assert score("math", solution, answer) == right


# ------------------------------------------------------------------------------------------ Video-R1's own rules


@pytest.mark.parametrize(
    "kind,solution,text,accuracy",
    [
        ("multiple choice", "A", "<answer> A </answer>", 1), ("multiple choice", "A", "<answer>A. cat</answer>", 0),
        ("multiple choice", "A", "<answer>A</answer><answer>B</answer>", 1), ("multiple choice", "A", "A", 0),
        ("numerical", "3", "<answer>3.0</answer>", 0), ("numerical", "3.001", "<answer>3.0</answer>", 1),
        ("numerical", "1000", "<answer>1,000</answer>", 0), ("numerical", "0.5", "<answer>1/2</answer>", 0),
        ("numerical", "50", "<answer>50%</answer>", 0), ("numerical", "3", "<answer>3 cm</answer>", 0),
        ("regression", "10", "<answer>9</answer>", 0.9), ("regression", "10", "<answer>nan</answer>", 1),
        ("regression", "10", "<answer>x</answer>", 0),
        ("OCR", "STOP AHEAD", "<answer>STOP</answer>", 0.5), ("free-form", "cat", "<answer>cats</answer>", 2 / 3),
    ],
)  # fmt: skip
def test_videor1_rules_are_reproduced_faults_included(kind, solution, text, accuracy):
    question = Question("", ANIMALS, solution, kind)
    assert reward(question, text, True, RewardConfig("videor1")) == pytest.approx(accuracy)
    both = RewardConfig("videor1", format_weight=1.0)
    form = text.startswith("<answer>")
    assert reward(question, f"<think>x</think> {text}", True, both) == pytest.approx(accuracy + form)
    assert reward(question, f"<think>x</think>{text}\n", True, both) == pytest.approx(accuracy)  # the newline costs 1


# ------------------------------------------------------------------------------------------ everything is finite


@pytest.mark.parametrize(
    "kind,solution",
    [("multiple choice", "A"), ("multiple select", "A, B"), ("numerical", "3"), ("regression", "3"), ("OCR", "a b"),
     ("free-form", "a b"), ("exact", "yes"), ("math", "3")],
)  # fmt: skip
@pytest.mark.parametrize("rules", ["strict", "videor1"])
def test_any_text_gives_a_finite_reward_quickly(kind, solution, rules):
    odd = ["", "\0", "\ud800", "🙂" * 50, "\\" * 999, "{" * 999, "(" * 999, "nan", "-", "%", "/", "$" * 999]
    odd += ["a" * 10_000_000, "1 " * 1_000_000, "\n" * 10**6, "(A" * 400, "A," * 400, "1,111" * 50, "- " * 140 + "1"]
    odd += ["A. " + "x " * 300, "the answer is " * 300, "9e9999", "1/" * 100]
    begin = time.monotonic()
    for text in odd:
        assert math.isfinite(score(kind, solution, text, ANIMALS, rules=rules))
        assert math.isfinite(reward(Question("", [], solution, kind), text, True, RewardConfig(rules)))
    assert time.monotonic() - begin < 15


# ------------------------------------------------------------------------------------------ scoring processes


def test_scorer_equals_the_function_and_counts_what_fails(tmp_path):
    question = Question("", ANIMALS, "B", "multiple choice")
    texts = [f"<answer>{c}</answer>" for c in "ABCD"]
    with Scorer(RewardConfig(max_error_fraction=0.5), tmp_path) as scorer:
        assert scorer.collect([scorer.submit(question, t, True) for t in texts]) == [0, 1, 0, 0]
        broken = question._replace(problem_type="essay")
        futures = [scorer.submit(broken, texts[0], True), scorer.submit(question, texts[1], True)]
        assert scorer.collect(futures) == [0, 1]
        assert (scorer.seen, scorer.errors) == (6, 1)
    line = json.loads((tmp_path / "reward_errors.jsonl").read_text())
    assert "unknown problem type 'essay'" in line["reason"] and line["response"] == 5


@pytest.mark.parametrize("workers", [0, 1])
def test_a_users_function(tmp_path, workers):
    file = tmp_path / "mine.py"
    body = "return len(text) + 10 * finished + (sample.solution == 'B')"
    file.write_text(f"def reward(sample, text, finished):\n    {body}\n")
    question = Question("", ANIMALS, "B", "multiple choice")
    with Scorer(RewardConfig(file=str(file), workers=workers)) as scorer:
        assert scorer.collect([scorer.submit(question, "xyz", True), scorer.submit(question, "xyz", False)]) == [14, 4]


def test_scoring_that_hangs_dies_or_raises_is_counted_and_stops_the_run(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import os, re\n"
        "class Mine(Exception): pass\n"
        "def reward(sample, text, finished):\n"
        "    if text == 'hang': re.fullmatch('(a+)+b', 'a' * 60)\n"  # stuck inside C code
        "    if text == 'die': os.abort()\n"
        "    if text == 'nan': return float('nan')\n"
        "    if text == 'own': raise Mine('no such thing')\n"
        "    return 1 / len(text)\n"
    )
    question = Question("", [], "B", "multiple choice")
    config = RewardConfig(file=str(file), timeout_s=2.0, max_error_fraction=0.3)
    with Scorer(config, tmp_path) as scorer:
        begin = time.monotonic()
        futures = [scorer.submit(question, t, True) for t in ("hang", "xx", "die", "xx", "nan", "", "own", "x")]
        assert scorer.collect(futures) == [0, 0.5, 0, 0.5, 0, 0, 0, 1]
        assert time.monotonic() - begin < 30 and scorer.errors == 5
        reasons = [json.loads(line)["reason"] for line in (tmp_path / "reward_errors.jsonl").read_text().splitlines()]
        assert reasons[0] == "scoring process took longer than 2 s" and reasons[1] == "scoring process died of SIGABRT"
        assert "returned nan" in reasons[2] and reasons[3] == "ZeroDivisionError: division by zero"
        assert reasons[4].endswith("Mine: no such thing")
        message = r"scoring failed for \d+ of \d+ responses, over --reward.max-error-fraction 0.3"
        with pytest.raises(ValueError, match=message):
            scorer.collect([scorer.submit(question, "", True) for _ in range(20)])


@pytest.mark.parametrize(
    "config,message",
    [
        (RewardConfig(file="/nowhere.py"), "--reward.file /nowhere.py: no such file"),
        (RewardConfig(format_weight=-1), "--reward.format-weight -1"),
        (RewardConfig(timeout_s=0), "--reward.timeout-s 0"),
        (RewardConfig(file=__file__, format_weight=1), "--reward.file replaces all rules"),
    ],
)
def test_settings_that_cannot_work(config, message):
    with pytest.raises(ValueError, match=message):
        Scorer(config)
