"""Releases of an upstream that the package index offers as sdists, pinned or not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from carry.download import Listed, listing
from carry.errors import UserError
from carry.paths import House
from carry.pins import Pin, Upstream, load_pin, versions
from carry.sources import file_sha256

LATEST = "latest"


class Offer(NamedTuple):
    """A release as the index lists it; `sdist` is None where it has only wheels."""

    version: str
    sdist: Listed | None
    yanked: bool


def offers(upstream: Upstream) -> dict[str, Offer]:
    """version -> what the index offers of it, oldest first, pre-releases left out.

    Raises CouldNotRun where an index does not answer.
    """
    from packaging.version import InvalidVersion, Version

    found: dict[Version, Offer] = {}
    for file in listing(upstream.index_name):
        try:
            version = Version(_version_of(file.name, upstream))
        except InvalidVersion:
            continue
        if version.is_prerelease or version.local:
            continue
        known = found.get(version, Offer(str(version), None, True))
        sdist = file if _is_sdist(file.name) and known.sdist is None else known.sdist
        found[version] = Offer(known.version, sdist, known.yanked and file.yanked)
    return {found[version].version: found[version] for version in sorted(found)}


def choose(upstream: Upstream, offered: dict[str, Offer], version: str) -> Offer:
    """The offer of `version`, or of the newest release for "latest".

    Raises UserError where there is none, where it is yanked, or has no sdist.
    """
    usable = [offer for offer in offered.values() if offer.sdist and not offer.yanked]
    if not usable:
        raise UserError(f"the index has no sdist of {upstream.index_name}; check the name in upstream.toml")
    if version == LATEST:
        return usable[-1]
    offer = offered.get(version)
    if offer is None:
        raise UserError(f"the index has no {upstream.index_name} {version!r}; its newest is {usable[-1].version}")
    if offer.yanked:
        raise UserError(f"{upstream.index_name} {version} is yanked; name another, its newest is {usable[-1].version}")
    if offer.sdist is None:
        raise UserError(f"{upstream.index_name} {version} has no sdist on the index, only wheels; name another release")
    return offer


def between(upstream: Upstream, offered: dict[str, Offer], first: str, last: str) -> list[Offer]:
    """Every usable release from `first` to `last`, both of which must exist. Raises UserError as `choose`."""
    from packaging.version import Version

    low, high = (Version(choose(upstream, offered, version).version) for version in (first, last))
    if low > high:
        raise UserError(f"{first} comes after {last}; give the older one first")
    return [o for o in offered.values() if o.sdist and not o.yanked and low <= Version(o.version) <= high]


def as_pin(house: House, upstream: Upstream, offer: Offer, stacks: tuple[str, ...], folder: Path) -> Pin:
    """A pin of `offer` that is not in patches/; `folder` is where its patches would lie.

    A release that is pinned keeps its pin's identity, so that what was made of it is found again.
    Raises UserError where the index offers other bytes than the pin's, or names no sha256.
    """
    if offer.version in versions(house, upstream.name):
        pin = load_pin(house, upstream.name, offer.version)
        if offer.sdist.sha256 not in (None, pin.sha256):
            raise UserError(
                f"{offer.sdist.name}: the index says sha256 {offer.sdist.sha256}, the pin {pin.sha256}; "
                "find out which one is right before you go on"
            )
        return replace(pin, stacks=stacks or pin.stacks, folder=folder)
    sha256 = offer.sdist.sha256 or (offer.sdist.path and file_sha256(offer.sdist.path))
    if not sha256:
        raise UserError(f"the index names no sha256 for {offer.sdist.name}; it cannot be verified")
    return Pin(
        upstream=upstream,
        version=offer.version,
        sdist=offer.sdist.name,
        sha256=sha256,
        tag=f"v{offer.version}",
        commit=None,
        revision=1,
        stacks=stacks,
        folder=folder,
    )


def pin_below(house: House, upstream: Upstream, version: str, or_same: bool = False) -> Pin | None:
    """The newest pin older than `version` (`or_same`: or of it); None where there is none."""
    from packaging.version import Version

    limit = Version(version)
    known = [v for v in versions(house, upstream.name) if Version(v) < limit or (or_same and Version(v) == limit)]
    return load_pin(house, upstream.name, max(known, key=Version)) if known else None


def _is_sdist(name: str) -> bool:
    return name.endswith((".tar.gz", ".tar.bz2", ".tar.xz"))


def _version_of(name: str, upstream: Upstream) -> str:
    rest = re.sub(r"^" + re.sub(r"[-_.]+", "[-_.]+", upstream.index_name) + "-", "", name, flags=re.IGNORECASE)
    return re.sub(r"\.(tar\.\w+|zip)$", "", rest) if not name.endswith(".whl") else rest.partition("-")[0]
