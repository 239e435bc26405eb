"""Make the tables of docs/benchmarks.md from the results.

    python benchmarks/table.py            # rewrite docs/benchmarks.md between its markers
    python benchmarks/table.py --check    # fail if a table there is not what the results say
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks.md"
NAMES = {
    "trl": "TRL, its defaults",
    "trl_bf16": "TRL, unquantised parts in bf16",
    "ours": "**this project**",
    "ours_plain": "this project, `fused=False`",
    "trl_bf16_kept": "TRL, the same, `gradient_checkpointing=False`",
    "ours_kept": "this project, `keep_activations=True`",
    "ours_16bit": "this project, `load_in_4bit=False`",
    "unsloth": "Unsloth",
    "ours_fsdp_config": "this project, FSDP2 config, one process",
}


def load(pattern: str) -> list[dict]:
    return [entry for file in sorted(RESULTS.glob(pattern)) for entry in json.loads(file.read_text())]


def where(entry: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in entry["versions"].items())
    return f"{entry['gpu']}, {entry['weights']} weights; {versions}."


def rows(entries: list[dict], columns: str, cells) -> str:
    """A table with a row for each entry: what was run, then `cells(entry)`, or why it failed."""
    names = ["model", "seq × batch", "contender", *columns.split(" | ")]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for e in entries:
        extra = f", {', '.join(e['extra'])}" if e.get("extra") and e["contender"].startswith("ours") else ""
        what = [e["model"].upper(), f"{e['seq']} × {e['batch']}", NAMES.get(e["contender"], e["contender"]) + extra]
        found = [f"failed: {e['error']}"] + [""] * (len(names) - 4) if "error" in e else cells(e)
        lines.append(f"| {' | '.join(what + found)} |")
    return "\n".join([*lines, "", *(where(e) for e in [e for e in entries if "gpu" in e][:1])]) if entries else "No results yet."


def memory_table() -> str:
    def cells(e: dict) -> list[str]:
        gib = [f"{e[key]:.2f}" for key in ("load_peak_gib", "train_peak_gib", "train_reserved_gib")]
        return [*gib, f"{e['tokens_per_second']:,}"]

    return rows(load("memory_*.json"), "load peak GiB | train peak GiB | reserved GiB | tokens/s", cells)


def longest_table() -> str:
    entries = load("longest_*.json")
    if not entries:
        return "No results yet."
    limits = sorted({found["limit_gib"] for e in entries for found in e["longest_sequences"]})
    lines = [f"| model | {' | '.join(f'{limit:g} GiB' for limit in limits)} |", "|---" * (len(limits) + 1) + "|"]
    models: dict[tuple, dict[float, int]] = {}  # what ran in any run
    for e in entries:
        longest = models.setdefault((e["model"].upper(), ", ".join(e["extra"])), {})
        for found in e["longest_sequences"]:
            longest[found["limit_gib"]] = max(longest.get(found["limit_gib"], 0), found["longest"] or 0)
    for (model, extra), longest in models.items():
        cells = [f"{longest[limit]:,}" if longest.get(limit) else "–" for limit in limits]
        lines.append(f"| {model}{f' ({extra})' if extra else ''} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", where(entries[0])])


def speed_table(entries: list[dict] | None = None) -> str:
    """Each contender beside stock TRL, with its defaults or else in bf16, in the same run or else in another on the same machine; of
    all results if none are given."""
    entries = load("speed_*.json") if entries is None else entries

    def cells(e: dict) -> list[str]:
        like = [o for o in entries if "error" not in o and all(o.get(key) == e.get(key) for key in ("model", "seq", "batch"))]
        beside = [[o for o in like if key in e and o.get(key) == e[key]] for key in ("run", "machine")]
        stock = next((o for same in beside for name in ("trl", "trl_bf16") for o in same if o["contender"] == name), None)
        ratio = f"{e['tokens_per_second'] / stock['tokens_per_second']:.2f}" if stock else ""
        peak = f"{e['train_peak_gib']:.2f} ({e['train_reserved_gib']:.2f})"
        speed = [f"{e['tokens_per_second']:,}", ratio, f"{e['step_ms']:.0f}", f"{e['busy_ms']:.0f}", f"{e['launches']:,}"]
        start = f"{e['first_step_after_s']:.0f}, {e['fourth_step_after_s']:.0f}" if "first_step_after_s" in e else "–"
        return [*speed, f"{e['floor']:.0%}", peak, start]

    columns = "tokens/s | × stock | step ms | GPU busy ms | launches | of the floor | peak GiB (reserved) | 1st, 4th step after s"
    return rows(entries, columns, cells)


TABLES = {"memory": memory_table, "speed": speed_table, "longest": longest_table}


def main() -> None:
    page = PAGE.read_text()
    made = page
    for name, table in TABLES.items():
        block = f"<!-- {name} -->\n{table()}\n<!-- /{name} -->"
        made = re.sub(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, block=block: block, made, flags=re.S)
    if "--check" in sys.argv:
        if made != page:
            sys.exit("docs/benchmarks.md does not say what benchmarks/results says: run `python benchmarks/table.py`.")
        return
    PAGE.write_text(made)


if __name__ == "__main__":
    main()
