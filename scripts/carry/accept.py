"""Which representation an `Accept` header asks for (RFC 9110 section 12.5.1, PEP 691)."""

from __future__ import annotations

JSON = "application/vnd.pypi.simple.v1+json"
HTML = "application/vnd.pypi.simple.v1+html"
TEXT = "text/html"

# PEP 691's "latest" is an alias: the reply carries the concrete version.
_ALIASES = {
    "application/vnd.pypi.simple.latest+json": JSON,
    "application/vnd.pypi.simple.latest+html": HTML,
}
# Best first among equally wanted types. A client that names none is curl or an old pip: plain HTML.
_NAMED, _ANY = (JSON, HTML, TEXT), (TEXT, HTML, JSON)


def choose(accept: str | None) -> str | None:
    """The media type to answer with, or None when nothing on offer is acceptable (406)."""
    ranges = _parse(accept) if accept and accept.strip() else [("*/*", 1.0)]
    best = None
    for offer in _NAMED:
        specificity, quality = max(
            ((_specificity(media, offer), q) for media, q in ranges if _specificity(media, offer)),
            default=(0, 0.0),
        )
        if quality > 0:
            order = _ANY if specificity == 1 else _NAMED
            rank = (quality, specificity, -order.index(offer), offer)
            best = max(best, rank) if best else rank
    return best[-1] if best else None


def _parse(accept: str) -> list[tuple[str, float]]:
    ranges = []
    for item in accept.split(","):
        media, *parameters = (part.strip().lower() for part in item.split(";"))
        quality = 1.0
        for parameter in parameters:
            name, _, value = parameter.partition("=")
            if name.strip() == "q":
                try:
                    quality = min(max(float(value), 0.0), 1.0)
                except ValueError:
                    quality = 0.0
        if media:
            ranges.append((_ALIASES.get(media, media), quality))
    return ranges


def _specificity(media: str, offer: str) -> int:
    """3 names the offer, 2 its family, 1 anything; 0 does not match."""
    if media == offer:
        return 3
    if media == offer.partition("/")[0] + "/*":
        return 2
    return int(media == "*/*")
