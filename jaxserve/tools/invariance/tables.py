"""Text report."""

from collections.abc import Sequence

from jaxserve.tools.invariance.check import Finding
from jaxserve.tools.invariance.comparison import Agreement


def line(finding: Finding) -> str:
    """Return a line with an axis, its result and the evidence."""
    head = f"{finding.axis:<16} {finding.grade:<8}"
    if finding.agreement is None:
        return f"{head} {finding.detail}"
    return f"{head} {_counts(finding.agreement)}; {finding.detail}"


def counterexample(finding: Finding) -> str:
    """Return a sentence about the first token that differs; "" if none does."""
    found = finding.agreement and finding.agreement.counterexample
    if not found:
        return ""
    other = "not among the most likely" if found.found_logprob is None else f"log probability {found.found_logprob:.6f}"
    return (
        f"first counterexample: {finding.axis}, {'greedy' if found.is_greedy else 'sampled'} request {found.request}, "
        f"output token {found.position}: id {found.expected} alone (log probability {found.expected_logprob:.6f}), "
        f"id {found.found} otherwise ({other} alone)"
    )


def summary(findings: Sequence[Finding]) -> str:
    """Return the axes by grade, and the first counterexample."""
    parts = []
    for grade, text in (
        ("bitwise", "bitwise the same"),
        ("ids", "the same ids"),
        ("differs", "different ids"),
        ("not run", "not run"),
    ):
        if names := [finding.axis for finding in findings if finding.grade == grade]:
            parts.append(f"{text}: {', '.join(names)}")
    examples = filter(None, map(counterexample, findings))
    return "\n".join(["; ".join(parts), *list(examples)[:1]])


def _counts(agreement: Agreement) -> str:
    """Return a clause with the numbers of requests that agree, and the largest difference of log probabilities."""
    if agreement.grade == "bitwise":
        return f"{agreement.num_requests} of {agreement.num_requests} requests"
    return (
        f"{agreement.num_equal} of {agreement.num_requests} requests have the same ids, {agreement.num_bitwise} "
        f"bitwise; log probabilities differ by at most {agreement.max_logprob_difference:.1e}"
    )
