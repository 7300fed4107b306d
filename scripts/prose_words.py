"""Patterns that `check_prose.py` counts: turns that are rare in plain English, and words outside the vocabulary.

They match text whose white space is single spaces, without code spans and short quotations.
"""

import re
from typing import NamedTuple

_ARTICLE = r"(?:a|an|the|its|their|each|every|all|any|one|two|no|these|those)"
_MATRIX = r"(?:matri(?:x|ces)|weights)"
_PLACES = (
    r"(?:directory|folder|file|line|position|index|offset|point|page|slot|row|host|machine|memory|device|module|address"
    r"|place|table|list|document|README|stay|from|to|know|knows|see|decide|decides|tell|tells|show|shows|say|says)"
)


class Rule(NamedTuple):
    """One habit: its pattern, and the wording to use instead."""

    pattern: re.Pattern[str]
    instead: str


def _rule(pattern: str, instead: str) -> Rule:
    """Return the rule for a pattern, from the start of a word and in any case."""
    return Rule(re.compile(rf"\b(?:{pattern})", re.IGNORECASE), instead)


OF = re.compile(r"\bof\b", re.IGNORECASE)
_TURNS = [
    _rule(r"that of\b|those (?:of|that|with|without|whose|which|who|for|in|on|from)\b", "repeat the noun"),
    _rule(r"what\b(?![^.?!]*\?)", "name the thing"),
    _rule(r", (?:of|for|in|by|to|from|with|on|after|before|without) (?:which|whom|whose)\b", "write a second sentence"),
]
_WHERE = re.compile(r"(?:(\w+),? )?\bwhere\b", re.IGNORECASE)
_IS_PLACE = re.compile(rf"{_PLACES}s?", re.IGNORECASE)
WORDS = [
    _rule(r"(?:matrix|ragged|quantised|grouped|expert|dense|linear) products?\b|products of experts\b", "matmul, GEMM"),
    _rule(
        r"(?:products? (?:of|with|by|for)|multipl(?:y|ies|ied|ying)(?: \w+)? (?:by|with)) "
        rf"(?:{_ARTICLE} )?(?:\w+ )?{_MATRIX}\b",
        "matmul, GEMM",
    ),
    _rule(r"rows? in decode\b|in decode\b(?! \w)", "decoding rows, decode batch"),
    _rule(
        r"(?<!left )(?<!fall )(?<!falls )(?<!lag )(?<!lags )behind\b"
        r"(?! (?:\w+ ){0,3}(?:proxy|proxies|balancer|flag)\b)",
        "after",
    ),
    _rule(r"room\b", "capacity, free pages, fits"),
    _rule(
        r"(?!(?:is|are|was|were|be|being|even|do|run|runs|ran|served|computed|left|stands|leave|leaves|it|them) alone)"
        r"\w+ alone\b(?=[.,;:)]|$)",
        "only",
    ),
    _rule(r"(?:attend\w*|attention) over latents\b|(?<!head )latent attention\b", "MLA"),
    _rule(r"mixtures?\b(?! of (?:\w+ )?(?:experts|distributions|gaussians))", "MoE"),
    _rule(r"experts of (?:every|all) tokens?\b", "shared experts"),
    _rule(r"layers? (?:with|that ha(?:s|ve)) (?:a )?states?\b|delta nets?\b", "recurrent layers, Gated DeltaNet"),
    _rule(
        r"(?:layers?|attention) without (?:a )?(?:rotation|positions?)\b|norms? (?:behind|after) (?:the )?attention\b",
        "NoPE, post-norm",
    ),
    _rule(
        rf"(?:{_ARTICLE}|of|between|first|last|such|whose) marks?\b|thoughts?\b(?! of)|calls of (?:\w+ )?tools?\b",
        "delimiter, reasoning, tool call",
    ),
    _rule(r"(?<!\bin )facts?\b", "parameters, properties"),
    _rule(r"(?:go|goes|went|gone|going) on\b(?! (?:the|a|an|each|every|one|its|which|devices?)\b)", "continue, resume"),
    _rule(
        r"sizes? of (?:\w+ )?blocks?\b|kept programs?\b|promises?\b|lone\b|kin\b",
        "block size, cached executable, SLO, isolated, variant",
    ),
]


def turns(text: str) -> list[tuple[int, str, str]]:
    """Return offset, phrase and advice for each turn of phrase that a file may have rarely."""
    found = [(match.start(), match[0], rule.instead) for rule in _TURNS for match in rule.pattern.finditer(text)]
    for match in _WHERE.finditer(text):
        if not (match[1] and _IS_PLACE.fullmatch(match[1])):
            found.append((match.end() - len("where"), "where", "if, when"))
    return sorted(found)


def forbidden(text: str) -> list[tuple[int, str, str]]:
    """Return offset, phrase and advice for each word that the vocabulary replaces."""
    return sorted((match.start(), match[0], rule.instead) for rule in WORDS for match in rule.pattern.finditer(text))
