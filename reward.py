"""Rewards: how well a response's text answers its question; pure functions of text, checked by rules.

    response text ──→ exactly one <answer>…</answer> ──→ compare by problem type ──→ 0 … 1

Run:  python reward.py
"""

from __future__ import annotations

import math
import re


def reward(sample, text: str, finished: bool, format_weight: float = 0.0) -> float:
    """Accuracy of the answer in `text`, 0 to 1, plus `format_weight` for one well-formed answer; never NaN.

    `sample` has solution, problem_type and options. A response that did not finish (no end token) scores 0.
    """
    answer = extract_answer(text) if finished else None
    if answer is None:
        return 0.0
    score = _accuracy(sample.problem_type, answer, sample.solution, sample.options)
    return (score if math.isfinite(score) else 0.0) + format_weight


def extract_answer(text: str) -> str | None:
    """What stands in <answer>…</answer>; None unless there is exactly one such pair."""
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return None
    match = re.search(r"<answer>(.*)</answer>", text, re.DOTALL)
    return match.group(1).strip() if match else None


def _accuracy(problem_type: str, answer: str, solution: str, options: list[str]) -> float:
    if problem_type == "multiple choice":
        return float(_letter(answer, options) == _letter(solution, options) is not None)
    if problem_type in ("numerical", "regression"):
        a, b = _number(answer), _number(solution)
        if a is None or b is None:
            return 0.0
        if problem_type == "numerical":
            return float(math.isclose(a, b, rel_tol=1e-9, abs_tol=5e-3))
        return max(0.0, 1 - abs(a - b) / max(abs(b), 1e-9))
    return float(" ".join(answer.lower().split()) == " ".join(solution.lower().split()))


def _letter(answer: str, options: list[str]) -> str | None:
    match = re.fullmatch(r"\(?([A-Za-z])[).:]?(?:\s+.*)?", answer, re.DOTALL)
    return match.group(1).upper() if match else None


def _number(text: str) -> float | None:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None
