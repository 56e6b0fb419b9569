"""Traces written by hand, and by a profiler around a real run of a dumped graph."""

import gzip
import json
import zlib

HOST = {"pid": 1, "tid": 1, "ph": "X"}


def digest(names):
    return f"{zlib.crc32(' '.join(names).encode()):08x}"


def span(name, ts, dur, cat="cpu_op", **fields):
    return {**HOST, "name": name, "cat": cat, "ts": ts, "dur": dur, **fields}


def graph_run(kind, names, ts, dur, compile_name="0/0"):
    """The range of one run of a graph with these collectives."""
    return span(f"zpasses.graph:{compile_name}:{kind}:{digest(names)}", ts, dur, "user_annotation")


def memory(ts, allocated, device=0):
    args = {"Device Type": device, "Total Allocated": allocated}
    return {"ph": "i", "name": "[memory]", "ts": ts, "pid": 1, "tid": 1, "args": args}


def write(path, events, **fields):
    text = json.dumps({"traceEvents": events, **fields})
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path
