"""Reward: how well a response answers its question, decided by rules on its text.

    text ─► one <answer>…</answer> ─► compare by problem type ─► accuracy 0…1 ─┐
      └───► whole text has the asked form? ───────────── × format_weight ──────┼─► reward
    token count ─► right and of the asked length? ───── + length_bonus ────────┘

`reward` is a pure function of its arguments. `Scorer` runs it (or a user's own function) in worker processes under a
time limit, since a response may hang a computer algebra system, and counts what fails instead of hiding it in zeros.

Rules are strict where credit would be luck (two answer tags, two letters, a letter with another option's text) and
lenient where only the writing differs ("(A)", "A. cat", "1,000", "½", "5 × 10³", "50%"). `rules="videor1"` reproduces
Video-R1's published reward, its faults included, for comparison.

Run:  python reward.py 'multiple choice' A '<answer>(A)</answer>'    the reward of a text, and scoring speed
Left out on purpose: learned reward models, judging by another model.
To add a problem type, add a function to _STRICT; to use your own reward, write reward(sample, text, finished) -> float
in a file and name it with --reward.file.
"""

import importlib.util
import json
import logging
import math
import re
import sys
import time
import unicodedata
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from decode import WorkerDied, Workers


@dataclass(frozen=True)
class RewardConfig:
    rules: Literal["strict", "videor1"] = "strict"
    """How answers are judged. strict: by the tables in this file. videor1: as Video-R1's published code does."""
    file: str = ""
    """A Python file with your own `reward(sample, text, finished) -> float`; replaces the rules. sample has question,
    options, solution, problem_type, source and index."""
    format_weight: float = 0.0
    """Added when the whole response has the asked form (Video-R1: 1.0); 0 and up."""
    think: bool = False
    """The asked form includes <think>…</think> before the answer (as --data.instruction video-r1 asks for)."""
    length_bonus: float = 0.0
    """Added to a right answer whose response has length_min to length_max tokens (Video-R1: 0.2); 0 and up."""
    length_min: int = 320
    """Fewest tokens for the length bonus."""
    length_max: int = 512
    """Most tokens for the length bonus."""
    workers: int = 1
    """Scoring processes of each trainer rank; 0 scores in the trainer itself, without a time limit."""
    timeout_s: float = 10.0
    """Seconds after which one response's scoring is ended and counted as an error; above 0."""
    max_error_fraction: float = 0.02
    """The run stops when scoring failed for more than this share of the responses (of at least 20); 0 to 1."""

    def validate(self) -> None:
        for name in ("format_weight", "length_bonus"):
            if getattr(self, name) < 0:
                raise ValueError(f"--reward.{name.replace('_', '-')} {getattr(self, name)}: give 0 or more")
        if self.file and not Path(self.file).is_file():
            raise ValueError(f"--reward.file {self.file}: no such file")
        if self.file and (self.format_weight or self.length_bonus):
            raise ValueError(
                "--reward.file replaces all rules: leave --reward.format-weight and --reward.length-bonus at 0"
            )
        if self.timeout_s <= 0:
            raise ValueError(f"--reward.timeout-s {self.timeout_s}: give seconds above 0")


class Question(NamedTuple):
    """The part of a data.Sample that rewards look at."""

    question: str
    options: list[str]
    solution: str  # the answer, without tags
    problem_type: str
    source: str = ""
    index: int = 0


def reward(sample, text: str, finished: bool, config: RewardConfig = RewardConfig(), tokens: int = 0) -> float:
    """Accuracy of the answer in `text` (0 to 1) plus the bonuses of `config`. Finite, or ValueError.

    `sample` is a data.Sample or a Question; `tokens` the response's length. A response that did not finish scores 0.
    ValueError means that the row or a user's function is at fault, never the response.
    """
    if config.file:
        score = float(_user_function(config.file)(sample, text, finished))
        if not math.isfinite(score):
            raise ValueError(f"--reward.file {config.file}: returned {score}")
        return score
    if not finished:
        return 0.0
    if config.rules == "videor1":
        accuracy = _videor1_accuracy(sample, text)
        form = re.fullmatch(r"<think>.*?</think>\s*<answer>.*?</answer>", text, re.DOTALL) is not None
    else:
        answer = extract_answer(text)
        if answer is None:
            return 0.0
        accuracy = _accuracy(sample, answer)
        form = well_formed(text, config.think)
    right_length = config.length_min <= tokens <= config.length_max and accuracy > 0.1
    return accuracy + config.format_weight * form + config.length_bonus * right_length


def check_solution(sample) -> None:
    """ValueError if the row's own solution cannot be read, so that no answer could ever be right."""
    if sample.problem_type in ("multiple choice", "multiple select", "numerical", "regression"):
        _STRICT[sample.problem_type]("", sample.solution, sample.options)


def extract_answer(text: str) -> str | None:
    """What stands in <answer>…</answer>; None unless there is exactly one such pair."""
    before, opening, rest = text.partition("<answer>")
    answer, closing, after = rest.partition("</answer>")
    if not (opening and closing) or any(
        tag in part for tag in ("<answer>", "</answer>") for part in (before, answer, after)
    ):
        return None
    return answer.strip()


def well_formed(text: str, think: bool) -> bool:
    """Nothing but the answer, or (with think) <think>…</think> and then the answer; white space around is free."""
    counts = {tag: text.count(tag) for tag in ("<think>", "</think>", "<answer>", "</answer>")}
    if any(n != (1 if think or "answer" in tag else 0) for tag, n in counts.items()):
        return False
    pattern = r"\s*<think>.*</think>\s*<answer>.*</answer>\s*" if think else r"\s*<answer>.*</answer>\s*"
    return re.fullmatch(pattern, text, re.DOTALL) is not None


class Scorer:
    """Scores in worker processes. `errors` of the `seen` responses failed: each scores 0 and is logged with its reason
    in reward_errors.jsonl; too many stop the run.

        futures = [scorer.submit(sample, text, finished, tokens) for …]     # as responses arrive
        rewards = scorer.collect(futures)
    """

    MIN_SEEN = 20  # responses before the share of errors is judged

    def __init__(self, config: RewardConfig, run_dir: str | Path | None = None) -> None:
        config.validate()
        self.config = config
        self.seen, self.errors = 0, 0
        self.log = Path(run_dir) / "reward_errors.jsonl" if run_dir else None
        self._workers = Workers(config.workers, config.timeout_s) if config.workers else None

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def submit(self, sample, text: str, finished: bool, tokens: int = 0) -> Future:
        question = Question(*(getattr(sample, name) for name in Question._fields))
        arguments = (question, text, finished, self.config, tokens)
        if self._workers:
            return self._workers.submit(reward, *arguments)
        future: Future = Future()
        try:
            future.set_result(reward(*arguments))
        except Exception as error:  # as from a worker: raised again by collect, which counts it
            future.set_exception(error)
        return future

    def collect(self, futures: list[Future]) -> list[float]:
        """The rewards, in order; waits. ValueError when too many failed."""
        scores = []
        for future in futures:
            self.seen += 1
            try:
                scores.append(future.result())
            except Exception as error:  # a user's function may raise anything: counted, logged, bounded
                self._failed(error)
                scores.append(0.0)
        return scores

    def close(self) -> None:
        """Ends the workers. No process is left."""
        if self._workers:
            self._workers.close()
            self._workers = None

    def _failed(self, error: Exception) -> None:
        self.errors += 1
        reason = f"scoring process {error}" if isinstance(error, WorkerDied) else f"{type(error).__name__}: {error}"
        if self.log:
            with open(self.log, "a") as file:
                file.write(json.dumps({"response": self.seen, "reason": reason}) + "\n")
        if self.seen >= self.MIN_SEEN and self.errors > self.config.max_error_fraction * self.seen:
            limit = f"over --reward.max-error-fraction {self.config.max_error_fraction}"
            raise ValueError(f"scoring failed for {self.errors} of {self.seen} responses, {limit}; the last: {reason}")


@cache
def _user_function(path: str):
    spec = importlib.util.spec_from_file_location("user_reward", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "reward"):
        raise ValueError(f"--reward.file {path}: has no function reward(sample, text, finished)")
    return module.reward


# ---------------------------------------------------------------------------------------------- strict rules


def _accuracy(sample, answer: str) -> float:
    rule = _STRICT.get(sample.problem_type)
    if rule is None:
        raise ValueError(f"unknown problem type {sample.problem_type!r}; known: {', '.join(_STRICT)}")
    if len(answer) > 10_000 + 20 * len(sample.solution):  # no right answer is that long, and rules cost time
        return 0.0
    return rule(answer, sample.solution, sample.options)


def _choice_score(answer: str, solution: str, options: list[str]) -> float:
    right = parse_choice(solution, options)
    if right is None:
        raise ValueError(f"the solution {solution!r} names none of the options {options}")
    return float(parse_choice(answer, options) == right)


def _choices_score(answer: str, solution: str, options: list[str]) -> float:
    """Several right options, all of which must be named and no other; "none" for none of them."""
    right = _parse_choices(solution, options)
    if right is None:
        raise ValueError(f"the solution {solution!r} names none of the options {options}")
    return float(_parse_choices(answer, options) == right)


def _numeric_score(answer: str, solution: str, options: list[str]) -> float:
    """Equal within half of the second decimal place (Video-R1's precision) and within 1 %."""
    right, given = _solution_number(solution), parse_number(answer)
    if given is None or not _same_unit(given.unit, right.unit):
        return 0.0
    close = any(abs(a - b) <= max(min(0.005, 0.01 * abs(b)), 1e-9 * abs(b)) for a in given.values for b in right.values)
    return float(close)


def _regression_score(answer: str, solution: str, options: list[str]) -> float:
    """1 − relative error, at least 0; with percent signs the reading that fits best."""
    right, given = _solution_number(solution), parse_number(answer)
    if given is None or not _same_unit(given.unit, right.unit):
        return 0.0
    return max(max(0.0, 1 - abs(a - b) / max(abs(b), 1e-9)) for a in given.values for b in right.values)


def _ocr_score(answer: str, solution: str, options: list[str]) -> float:
    """1 − word error rate, at least 0. Scripts without spaces count characters."""
    import jiwer

    reference, hypothesis = " ".join(_words(solution)), " ".join(_words(answer))
    if not reference or not hypothesis:
        return float(reference == hypothesis)
    return max(0.0, 1.0 - jiwer.wer(reference, hypothesis))


def _free_form_score(answer: str, solution: str, options: list[str]) -> float:
    """Mean F of ROUGE-1, ROUGE-2 and ROUGE-L in lower case; ROUGE-2 only where the solution has two words, so that an
    exact answer scores 1."""
    reference = _words(_plain(solution))
    kinds = ["rouge1", "rougeL"] + ["rouge2"] * (len(reference) > 1)
    scores = _rouge().score(solution, answer)
    return float(sum(scores[kind].fmeasure for kind in kinds) / len(kinds))


def _exact_score(answer: str, solution: str, options: list[str]) -> float:
    """The same words, whatever case, articles and punctuation; a number also in another notation."""
    if _plain(answer) == _plain(solution):
        return 1.0
    given, right = parse_number(answer), parse_number(solution)
    return float(bool(given and right) and given.unit == right.unit and bool(given.values & right.values))


def _math_score(answer: str, solution: str, options: list[str]) -> float:
    """Mathematically equal (math-verify on sympy)."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off; ours is on
    if len(answer) > 500 or not answer or re.search(r"\bor\b|\\text\s*\{\s*or\s*\}|\\lor|;", answer):
        return 0.0  # two answers are none
    if _plain(answer) == _plain(solution):
        return 1.0
    right, given = (parse(_boxed(t), parsing_timeout=None) for t in (solution, answer))
    if not right:
        raise ValueError(f"math-verify cannot read the solution {solution!r}")
    return float(bool(given) and verify(right, given, timeout_seconds=None))


_STRICT = {
    "multiple choice": _choice_score,
    "multiple select": _choices_score,
    "numerical": _numeric_score,
    "regression": _regression_score,
    "OCR": _ocr_score,
    "free-form": _free_form_score,
    "exact": _exact_score,
    "math": _math_score,
}

# ---------------------------------------------------------------------------------------------- reading answers

_WRAPPERS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed|mbox)\s*\{([^{}]*)\}")
_LEAD = re.compile(
    r"(?:so |therefore,? |thus,? )?(?:my |the )?(?:final |correct |right |best )?"
    r"(?:answer|option|choice|result|value)(?: (?:is|would be|equals))?\s*[:=]?\s*(?:option |letter )?",
    re.IGNORECASE,
)


def parse_choice(answer: str, options: list[str]) -> str | None:
    """The one option meant, as an upper-case letter; None if there is none, or more than one.

    A letter may stand alone, in parentheses, or followed by . ) : and then by its option's text. A lower-case letter
    counts only on its own: "a" is A, "a cat" is no option (unless an option reads so).
    """
    if len(answer) > 2000:
        return None
    text = _unwrap(answer)
    table = {m.group(1): m.group(2) for m in map(_OPTION.fullmatch, map(_unwrap, options)) if m}
    if len(table) < len(options):  # options without letters
        table = {chr(65 + i): _unwrap(option) for i, option in enumerate(options)}
    whole = [letter for letter, option in table.items() if option and _plain(option) == _plain(text) != ""]
    bare = _unwrap(_LEAD.sub("", text, count=1)) if _LEAD.match(text) else text
    match = re.fullmatch(r"\(?([A-Za-z])\)?[.:)]?", bare)
    if match:
        letter = match.group(1).upper()
        clash = match.group(1).islower() and whole not in ([], [letter])  # "a" where option B reads "a"
        return letter if (letter in table or not table) and not clash else None
    match = re.fullmatch(r"(?:\(([A-Z])\)|([A-Z])[.:)])[.:)]?\s*(\S.*)", bare, re.DOTALL)
    if not match:
        return whole[0] if len(whole) == 1 else None
    letter, rest = match.group(1) or match.group(2), match.group(3)
    if table and letter not in table:
        return None
    if _plain(rest) == _plain(table.get(letter, "")):
        return letter
    another = re.search(r"(?:^|[\s,;/&(])[A-Z](?:[.:),]|$)", rest) or _plain(rest) in map(_plain, table.values())
    return None if another else letter


_OPTION = re.compile(r"\(?([A-Z])[.:)]\s*(.*)", re.DOTALL)


def _parse_choices(answer: str, options: list[str]) -> set[str] | None:
    """All options named, between commas, "and" or lines; the empty set for "none"; None if some part is no option."""
    text = _unwrap(answer)
    if _plain(text) in ("none", "none of them", "none of these", "none of above"):
        return set()
    for pattern in (r"\n+", r"\s*(?:[,;/&\n]|\band\b)\s*"):
        parts = [
            parse_choice(part, options) for part in re.split(pattern, _LEAD.sub("", text, count=1)) if part.strip()
        ]
        if parts and None not in parts:
            return set(parts)
    if re.fullmatch(r"[A-Z]{2,26}", text):  # "ABD"
        return set(text)
    return None


class Number(NamedTuple):
    values: frozenset[float]  # a percentage can be read in two ways: 50% is 50 or 0.5
    unit: str


_DIGITS = r"\d{1,3}(?:[ ,_'\u00a0\u202f]\d{3})+(?:\.\d+)?|\d+(?:[.,]\d+)?|\.\d+|\d+\."
_POWER = r"(?:\s*(?:[x*×·]|\\times|\\cdot)\s*10\s*\^\s*[({]?\s*([-+]?\d{1,4})\s*[)}]?|[eE]([-+]?\d{1,4}))?"
_NUMBER = re.compile(rf"([-+]?)\s*(?:(10)\s*\^\s*[({{]?\s*([-+]?\d{{1,4}})\s*[)}}]?|({_DIGITS}){_POWER})")
_FRACTION = re.compile(r"([-+]?)\s*(?:(\d{1,15})\s+)?(\d{1,15})\s*/\s*(\d{1,15})")
_UNIT_WORD = r"(?!(?:or|and|to)\b)[A-Za-zμ°Ωåé$€£¥]+(?:\^?-?\d)?"
_UNIT = re.compile(rf"\s*(%|percent\b)?\s*({_UNIT_WORD}(?:[/·* ]{_UNIT_WORD}){{0,4}})?\.?")
_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")


def parse_number(answer: str) -> Number | None:
    """The one number that the text is, with its unit; None if it is none, several, or not finite."""
    if len(answer) > 300:
        return None
    text = re.sub(r"(?<=\d)[⁰¹²³⁴-⁹⁻⁺]+", lambda m: f"^{m.group().translate(_SUPERSCRIPT)}", answer)
    text = re.sub(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r" \1/\2", text)
    text = re.sub(r"(\d)\s*([¼½¾⅓⅔⅛⅜⅝⅞⅕⅖⅗⅘⅙⅚])", r"\1 \2", text)
    text = _unwrap(text).replace("\u2044", "/").replace("\\%", "%").replace("\\,", "").replace("{,}", ",")
    text = text.translate({0x2212: "-", 0x2013: "-", 0x2012: "-", 0xFE63: "-"})
    text = _LEAD.sub("", text, count=1) if _LEAD.match(text) else text
    text = re.sub(
        r"^(?:about|approximately|approx\.?|roughly|around|≈|~|=|[A-Za-z]\s*=)\s*", "", text, flags=re.IGNORECASE
    )
    text = re.sub(r"^([-+]?)\s*[$€£¥]\s*", r"\1", text.strip())
    match = _FRACTION.match(text)
    if match:
        sign, whole, top, bottom = match.groups()
        value = int(whole or 0) + int(top) / int(bottom) if int(bottom) else math.nan
    else:
        match = _NUMBER.match(text)
        if not match:
            return None
        sign, ten, ten_power, digits, power, exponent = match.groups()
        value = 1.0 if ten else _plain_number(digits)
        shift = int(power or exponent or ten_power or 0)
        value = value * 10.0**shift if abs(shift) <= 308 else math.nan
    value = -value if sign == "-" else value
    unit = _UNIT.fullmatch(text[match.end() :])
    if not unit or not math.isfinite(value):
        return None
    return Number(frozenset({value, value / 100} if unit.group(1) else {value}), (unit.group(2) or "").strip())


def _plain_number(digits: str) -> float:
    grouped = re.fullmatch(r"\d{1,3}(?:([ ,_'\u00a0\u202f])\d{3}(?:\1\d{3})*)(\.\d+)?", digits)
    if grouped:
        return float(re.sub(r"[ ,_'\u00a0\u202f]", "", digits))
    return float(digits.replace(",", "."))  # a decimal comma


def _solution_number(solution: str) -> Number:
    number = parse_number(solution)
    if number is None:
        raise ValueError(f"the solution {solution!r} is not a number")
    return number


def _same_unit(a: str, b: str) -> bool:
    """Units are compared only where both are given; no conversion."""
    a, b = (re.sub(r"[\s.^]", "", u).lower().removesuffix("s") for u in (a, b))
    return not a or not b or a == b


def _unwrap(text: str) -> str:
    """One Unicode form for each character; no LaTeX text boxes, dollar signs, emphasis or quotes around."""
    text = unicodedata.normalize("NFKC", text).strip()
    for _ in range(3):
        text = _WRAPPERS.sub(r"\1", text).strip().strip("$*`\"'“”‘’ \n")
    return re.sub(r"^\\\((.*)\\\)$", r"\1", text, flags=re.DOTALL).strip()


def _plain(text: str) -> str:
    """Lower-case words without punctuation and articles."""
    text = _unwrap(text).casefold()
    words = "".join(" " if unicodedata.category(c)[0] == "P" and c not in "-/%" else c for c in text).split()
    return " ".join(w for w in words if w not in ("a", "an", "the")) or " ".join(words)


def _words(text: str) -> list[str]:
    """Words; in scripts that write no spaces, characters."""
    text = unicodedata.normalize("NFKC", text)
    return re.sub(r"([\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\u0e00-\u0e7f])", r" \1 ", text).split()


def _boxed(text: str) -> str:
    return text if "\\boxed" in text else f"\\boxed{{{text.strip().strip('$')}}}"


class _Tokenizer:
    """For ROUGE: its own tokenizer drops every letter outside a-z."""

    def tokenize(self, text: str) -> list[str]:
        return _words(_plain(text))


@cache
def _rouge(stemmer: bool = False):
    from rouge_score.rouge_scorer import RougeScorer

    kinds = ["rouge1", "rouge2", "rougeL"]
    return RougeScorer(kinds, use_stemmer=True) if stemmer else RougeScorer(kinds, tokenizer=_Tokenizer())


# ---------------------------------------------------------------------------------------------- Video-R1's rules


def _videor1_accuracy(sample, text: str) -> float:
    """Video-R1's accuracy reward, except that a response is judged by its own row's type (there: the batch's first)."""
    import jiwer

    match = re.search(r"<answer>\s*(.*?)\s*</answer>", text, re.DOTALL)
    answer, right, kind = match.group(1).strip() if match else "", sample.solution.strip(), sample.problem_type
    if len(answer) > 10_000 + 20 * len(right):
        return 0.0
    if kind in ("multiple choice", "multiple select", "exact", "math"):
        return float(answer == right)
    if kind == "OCR":
        reference = " ".join(right.split())
        return max(0.0, 1 - jiwer.wer(reference, " ".join(answer.split()))) if reference else float(not answer)
    if kind == "free-form":
        scores = _rouge(stemmer=True).score(right, answer)
        return sum(s.fmeasure for s in scores.values()) / 3
    try:
        a, b = float(answer.replace(",", "")), float(right.replace(",", ""))
    except ValueError:
        return 0.0
    if kind == "numerical":
        decimals = [any(c in t for c in ".,") for t in (answer, right)]
        return float(decimals[0] == decimals[1] and round(a, 2) == round(b, 2))
    return 1 - min(1.0, max(0.0, (abs(a - b) + 1e-9) / (abs(b) + 1e-9)))  # max(0.0, nan) is 0.0: "nan" scores 1


def main() -> None:
    if len(sys.argv) < 4:
        raise SystemExit(__doc__.split("Run:")[1].split("\n")[0].strip())
    kind, solution, text, *options = sys.argv[1:]
    question = Question("", options, solution, kind)
    for rules in ("strict", "videor1"):
        print(f"{rules}: {reward(question, text, True, RewardConfig(rules)):.4g}")
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < 1:
        reward(question, text, True)
        count += 1
    print(f"{count} rewards a second in one process")


if __name__ == "__main__":
    main()
