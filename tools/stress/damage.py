"""Damages a dump, as a number determines."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zpasses.tools.stress.read_dump import FORGED

__all__ = ["DAMAGES", "damage"]


def damage(folder: Path, draw: random.Random) -> tuple[str, str]:
    """Damage a dump in one to three ways. Returns the first way, and all of them in words."""
    first = draw.choice(list(DAMAGES))
    kinds = [first, *draw.choices(list(DAMAGES), k=draw.choice([0, 0, 1, 2]))]
    done = []
    for kind in kinds:
        try:
            done.append(f"{kind}: {DAMAGES[kind](folder, draw)}")
        except Exception as error:  # what it needs is damaged already
            done.append(f"{kind}: left out ({type(error).__name__})")
    return first, "; ".join(done)


def _files(folder: Path, *suffixes: str) -> list[Path]:
    found = [each for each in folder.rglob("*") if each.is_file() and not each.is_symlink()]
    return sorted(each for each in found if each.suffix in (suffixes or (".json", ".jsonl")))


def _snapshots(folder: Path) -> list[Path]:
    return [each for each in _files(folder, ".jsonl") if each.name != "events.jsonl"]


def _truncate(folder: Path, draw: random.Random) -> str:
    path = draw.choice(_files(folder))
    content = path.read_bytes()
    at = draw.randrange(len(content) + 1)
    path.write_bytes(content[:at])
    return f"{path.name} after {at} bytes"


def _flip(folder: Path, draw: random.Random) -> str:
    path = draw.choice(_files(folder))
    content = bytearray(path.read_bytes())
    places = [draw.randrange(len(content)) for _ in range(draw.randint(1, 8))]
    for at in places:
        content[at] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    return f"{path.name} at {places}"


def _lines(folder: Path, draw: random.Random) -> str:
    path = draw.choice(_files(folder, ".jsonl"))
    lines = path.read_bytes().splitlines(keepends=True)
    at = draw.randrange(len(lines))
    how = draw.choice(["duplicated", "deleted", "swapped"])
    if how == "duplicated":
        lines[at:at] = [lines[at]] * draw.choice([1, 2, 1000])
    elif how == "deleted":
        del lines[at : at + draw.choice([1, 3, len(lines)])]
    else:
        other = draw.randrange(len(lines))
        lines[at], lines[other] = lines[other], lines[at]
    path.write_bytes(b"".join(lines))
    return f"{path.name}, line {at + 1} {how}"


def _duplicate_or_delete_file(folder: Path, draw: random.Random) -> str:
    path = draw.choice(_files(folder))
    if draw.random() < 0.5:
        path.unlink()
        return f"{path.name} deleted"
    number = f"{draw.randrange(1000):03d}-"
    name = draw.choice(["events.jsonl", "compile.json", "x.json"])
    if path in _snapshots(folder):
        name = re.sub(r"^\d+-", number, path.name)
    other = path.with_name(name)
    shutil.copy(path, other)
    return f"{path.name} copied to {other.name}"


_NUMBERS = ("9" * 400, "9" * 5000, "1e400", "-1", "NaN", "Infinity", "9223372036854775807",
            "18446744073709551616", "0", "1.5", "1e308", "true", "null", '"7"', "-0")  # fmt: skip


def _numbers(folder: Path, draw: random.Random) -> str:
    path = draw.choice(_files(folder))
    text = path.read_text(errors="replace")
    found = list(re.finditer(r"(?<=[:,\[])-?\d+(\.\d+)?", text))
    wanted = draw.choice(_NUMBERS)
    for match in sorted(draw.sample(found, min(len(found), draw.choice([1, 1, 5]))),
                        key=lambda each: -each.start()):  # fmt: skip
        text = text[: match.start()] + wanted + text[match.end() :]
    path.write_text(text)
    return f"{path.name}, {wanted[:30]}"


def _deepen(folder: Path, draw: random.Random) -> str:
    path = draw.choice(_files(folder))
    text = path.read_text(errors="replace")
    places = [match.start() for match in re.finditer(r"(?<=:)[\[{]", text)]
    at, depth = draw.choice(places), draw.choice([10, 60, 65, 500, 200_000])
    opening, closing = draw.choice([("[", "]"), ('{"map":', "}"), ('{"a":', "}")])
    end = _end_of(text, at)
    inner = opening * depth + text[at:end] + closing * depth
    path.write_text(text[:at] + inner + text[end:])
    return f"{path.name}, {depth} {opening}"


def _end_of(text: str, at: int) -> int:
    return json.JSONDecoder().raw_decode(text, at)[1]


def _swap(folder: Path, draw: random.Random) -> str:
    one, other = draw.sample(_snapshots(folder), 2)
    names = one.name, other.name
    held = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(held)
    return " and ".join(names)


def _edit_header(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    first, _, rest = path.read_text().partition("\n")
    header = json.loads(first)
    edit(header)
    path.write_text(json.dumps(header) + "\n" + rest)


def _bases(folder: Path, draw: random.Random) -> str:
    path = draw.choice(_snapshots(folder))
    base = draw.choice([None, 0, int(path.name[:3]), draw.randrange(20), 999])
    _edit_header(path, lambda header: header.update(base=base))
    return f"{path.name} on {base}"


def _ids(folder: Path, draw: random.Random) -> str:
    """Change what refers to nodes: the order, and the uses of buffers."""
    path = draw.choice(_snapshots(folder))
    how = draw.choice(["reversed", "shuffled", "shorter", "doubled"])

    def edit(header: dict[str, Any]) -> None:
        order = header.get("order") or list(range(len(header["live_bytes"])))
        if how == "reversed":
            order.reverse()
        elif how == "shuffled":
            draw.shuffle(order)
        header["order"] = order[:-1] if how == "shorter" else order * (1 + (how == "doubled"))

    _edit_header(path, edit)
    return f"{path.name}, order {how}"


def _links(folder: Path, draw: random.Random) -> str:
    outside = folder.parent / "outside"
    outside.mkdir(exist_ok=True)
    places = [each for each in folder.rglob("*") if not each.is_symlink()]
    path = draw.choice(sorted(places))
    how = draw.choice(["link", "link to nothing", "pipe", "link to itself", "absolute link"])
    target = outside / path.name
    shutil.rmtree(target, ignore_errors=True)
    shutil.move(path, target)
    if how == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(
            {"link": os.path.relpath(target, path.parent), "link to nothing": "nothing",
             "link to itself": path.name, "absolute link": str(target)}[how]
        )  # fmt: skip
    return f"{path.name} is a {how}"


_HOSTILE = (
    f"x\n{FORGED}: line", "\x1b[2Jx", "\x1b]8;;file:///etc/passwd\x07x", "\u202ereversed", "a\rb",
    f"</script><script>{FORGED}", "\u2028x", "zero\u200bwidth", "\x00", "\U000e0041", "\x9b31m",
    "<img src=x onerror=alert(1)>", "../../outside", "/etc/passwd", "x" * 300, "x" * 100_000, "",
    "\ud800",
)  # fmt: skip


def _texts(folder: Path, draw: random.Random) -> str:
    """Replace one text everywhere it occurs in the dump, or one place."""
    path = draw.choice(_files(folder))
    text = path.read_text(errors="replace")
    found = sorted(set(re.findall(r'"(?:[^"\\]|\\.)*"', text)))
    old, new = draw.choice(found), json.dumps(draw.choice(_HOSTILE))
    everywhere = draw.random() < 0.5
    for each in _files(folder) if everywhere else [path]:
        content = each.read_text(errors="replace")
        each.write_text(content.replace(old, new, -1 if everywhere else 1))
    return f"{path.name}: {old[:40]} -> {new[:40]}"


def _file_names(folder: Path, draw: random.Random) -> str:
    path = draw.choice(sorted(each for each in folder.rglob("*") if not each.is_symlink()))
    name = draw.choice([f"x\n{FORGED}: line", "\x1b[2Jx", "\u202ex", "000-x.jsonl", "rank7", ""])
    path.rename(path.with_name(name + draw.choice([path.name, path.suffix])))
    return f"{path.name} -> {name!r}"


DAMAGES: Mapping[str, Callable[[Path, random.Random], str]] = {
    "truncated file": _truncate,
    "flipped bits": _flip,
    "lines": _lines,
    "files": _duplicate_or_delete_file,
    "numbers": _numbers,
    "nesting": _deepen,
    "swapped snapshots": _swap,
    "bases": _bases,
    "order": _ids,
    "links": _links,
    "hostile texts": _texts,
    "file names": _file_names,
}
"""Kind -> (folder, random numbers) -> what was damaged."""
