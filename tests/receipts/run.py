"""Runs everything that needs a GPU and records it in tests/receipts/<card>.json.

    python tests/receipts/run.py
    python tests/receipts/run.py --parts build suite --families sm80 --files test_cuda.py --limit 500
    python tests/receipts/run.py --parts build suite --again
    python tests/receipts/run.py --not-run REASON --card "NVIDIA H200"

Parts of one receipt may come from several runs.  What was under way when the limit was reached or SIGTERM
came is recorded as unfinished.  What was seen counts as long as it compiles to the same: the suites of a
family until a kernel of it changes; sanitizers take the rows whose compiled code they have not seen yet.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]
FOLDER = ROOT / "tests/receipts"
LEDGER = FOLDER / "sanitizers.json"
SCRATCH = ROOT / "build/receipt"
sys.path.insert(0, str(ROOT / "flashattn"))
import _build  # noqa: E402  (by path: the package may not be compiled yet)

sys.path.pop(0)
SOURCES = ("common", "mma", "sm90", "any", "families", "params.h", "instance.h")  # of csrc/, and the rows
SUITE = ("test_forward.py", "test_backward.py", "test_decode.py", "test_pairs.py", "test_regressions.py",
         "test_properties.py", "test_errors.py", "test_torch.py", "test_extreme.py", "test_training.py",
         "test_generation.py", "test_sdpa.py", "test_transformers.py", "test_compat.py", "test_cuda.py")
TOOLS = ("memcheck", "synccheck", "initcheck", "racecheck")
PARTS = ("build", "suite", *TOOLS)
MARGIN = 30  # seconds that a sanitizer needs after its last tests have begun
FAULT = re.compile(  # what a sanitizer found, and the next line, which may name the kernel
    r"=+ +((?:Invalid|Misaligned|Uninitialized|Error:|Warning:|Barrier error).*)\n=+ +(.*)")


def rows() -> list:
    """The CUDA rows of the table."""
    table = _build.instances()
    return [row for row in table.ROWS if row.module in table.CUDA_MODULES]


def digest() -> str:
    """Hash of what the CUDA kernels are compiled from."""
    text = hashlib.sha256(repr(_build.NVCC_FLAGS).encode())
    for name in SOURCES:
        path = _build.csrc() / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                text.update(file.relative_to(_build.csrc()).as_posix().encode() + file.read_bytes())
    for row in rows():
        text.update(row.unit().encode())
    return text.hexdigest()


def compiled() -> dict[str, str]:
    """Hash of the instructions that each row's unit was compiled to; lines and paths of sources leave them as
    they are."""
    objects = {path.stem: path for path in (ROOT / _build.objects()).rglob("*.o")}
    program = shutil.which("cuobjdump") or f"{_build.cuda_home()}/bin/cuobjdump"

    def instructions(row) -> str:
        dump = subprocess.run([program, "-sass", str(objects[row.name])], capture_output=True, text=True,
                              check=True)
        code = re.findall(r"^\s*Function : \S+|/\* 0x[0-9a-f]{16} \*/", dump.stdout, re.MULTILINE)
        return hashlib.sha256("".join(code).encode()).hexdigest()[:16]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {row.name: code for row, code in zip(rows(), pool.map(instructions, rows()))}


def code_of(receipt: dict, family: str) -> str:
    """Hash of the instructions of all kernels that a family's suite may launch."""
    table = _build.instances()
    modules = table.CUDA_MODULES
    before = modules[:modules.index(family)][-1:] if family in table.PARTIAL_MODULES else ()
    code = receipt.get("code", {})
    text = "".join(code.get(row.name, "") for row in rows() if row.module in (family, *before))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def forget_what_changed(receipt: dict) -> None:
    """Leaves the suites out whose kernels compile to something else now."""
    for family in list(receipt["suite"]):
        if receipt["suite code"].get(family) == code_of(receipt, family):
            continue
        del receipt["suite"][family]
        receipt["suite code"].pop(family, None)
        receipt["failures"] = [x for x in receipt["failures"] if not x.startswith(family + " ")]
        of_family = {row.name for row in rows() if row.module == family}
        receipt["rows"] = {name: x for name, x in receipt["rows"].items() if name not in of_family}


def unseen(receipt: dict, tool: str, some: str = "") -> list[str]:
    """Rows with this expression in their names whose code a sanitizer has not found clean."""
    seen = receipt.get("sanitizers", {}).get(tool, {}).get("rows", {})
    code = receipt.get("code", {})
    return [row.name for row in rows() if re.search(some, row.name)
            and (row.name not in seen or seen[row.name] != code.get(row.name))]


def unverified(receipt: dict) -> list[str]:
    """Rows of the table that the receipt does not show to be right."""
    return [row.name for row in rows() if receipt.get("rows", {}).get(row.name) != "passed"]


def unfinished(receipt: dict) -> list[str]:
    """Parts of a whole run that the receipt does not have to their end."""
    suite = receipt.get("suite", {})
    files = [f"{family} {file}" for family in _build.instances().CUDA_MODULES for file in SUITE
             if not suite.get(family, {}).get(file, {}).get("finished")]
    return files + [tool for tool in TOOLS if unseen(receipt, tool)]


def path_of(card: str) -> Path:
    return FOLDER / (re.sub(r"\W+", "_", card.removeprefix("NVIDIA ")).lower() + ".json")


def start(card: str) -> dict:
    """The card's receipt; of other sources until they are built and compared."""
    new = {"card": card, "suite": {}, "suite code": {}, "rows": {}, "failures": [], "sanitizers": {}}
    if path_of(card).exists():
        receipt = json.loads(path_of(card).read_text())
        if receipt["sources"] != digest():
            receipt["code"] = {}  # nothing counts before the build
        new |= {name: x for name, x in receipt.items() if name != "not run"}
    new["sources"] = digest()
    return new


def environment() -> dict:
    """What the run depends on besides the sources."""
    import torch

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    nvcc = subprocess.run([f"{_build.cuda_home()}/bin/nvcc", "--version"], capture_output=True, text=True)
    major, minor = torch.cuda.get_device_capability(0)
    return {"capability": f"{major}.{minor}", "driver": driver, "torch": torch.__version__,
            "nvcc": re.search(r"release [\d.]+, V([\d.]+)", nvcc.stdout)[1], "python": sys.version.split()[0],
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
            "archs": ";".join(dict.fromkeys((f"{major}.{minor}", "7.5+PTX" if major > 7 else "7.5")))}


class Run:
    """One run of this program: how much time it has left, and where its children write."""

    def __init__(self, receipt: dict, limit: float) -> None:
        self.receipt, self.end = receipt, time.monotonic() + limit
        SCRATCH.mkdir(parents=True, exist_ok=True)

    def start(self, command: list[str], **variables: str) -> subprocess.Popen:
        print("==", *command, flush=True)
        return subprocess.Popen(command, cwd=ROOT, start_new_session=True,
                                env=os.environ | {"PYTHONPATH": str(ROOT)} | variables)

    def wait(self, child: subprocess.Popen) -> int | None:
        """Exit status; None if the time was over before."""
        try:
            return child.wait(max(0.0, self.end - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self.end = 0
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return None

    def pytest(self, name: str, workers: int, *arguments: str, before: list[str] = (),
               **variables: str) -> subprocess.Popen:
        """Starts the tests of a part; ``before`` starts the command."""
        results = SCRATCH / f"{name}.jsonl"
        results.unlink(missing_ok=True)
        return self.start([*before, sys.executable, "-m", "pytest", "-q", "--device", "cuda", "--results",
                           str(results), "-n", str(workers), "-p", "no:cacheprovider", *arguments],
                          **variables)

    def results(self, name: str, child: subprocess.Popen) -> tuple[bool, dict, list[dict]]:
        """Whether the tests of a part came to their end, how many each file has, and their results."""
        status, results = self.wait(child), SCRATCH / f"{name}.jsonl"
        lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
        collected = lines[0]["collected"] if lines else {}
        return status is not None and status not in (2, 3, 4), collected, lines[1:]

    def parts(self, names: list[str], families: list[str], files: list[str], again: bool, workers: int,
              checkers: int, some: str) -> None:
        """The sanitizers run beside the suites; with more than one card, suites run beside each other too."""
        try:
            if "build" in names:
                self.build()
        finally:  # a build that failed has compiled nothing to compare with
            forget_what_changed(self.receipt)
        sanitizers = {tool: self.sanitizer(tool, left, i, checkers) for i, tool in enumerate(TOOLS)
                      if tool in names and (left := unseen(self.receipt, tool, some))}

        def record(family, child):
            if again:
                self.tested_again(family, child)
            else:
                self.tested(family, files, child)

        suites = {}
        for card, family in enumerate(families if "suite" in names else ()):
            tests = self.failed(family) if again else [f"tests/{file}" for file in files]
            if tests and time.monotonic() < self.end:
                suites[family] = self.suite(family, tests, workers, card)
                if cards() == 1:
                    record(family, suites.pop(family))
        for family, child in suites.items():
            record(family, child)
        for tool, child in sanitizers.items():
            self.sanitized(tool, child)

    def build(self) -> None:
        begin = time.monotonic()
        status = self.wait(self.start([sys.executable, "setup.py", "build_ext", "--inplace"],
                                      FLASHATTN_CUDA="on", FLASHATTN_ARCHS=self.receipt["archs"]))
        if status != 0:
            raise SystemExit("the build failed, or was not done within the limit")
        self.receipt["build seconds"] = round(time.monotonic() - begin)
        self.receipt["code"] = compiled()

    def failed(self, family: str) -> list[str]:
        """Tests of the family that failed, without the group that xdist puts behind a name."""
        return [re.sub(r"@\w+$", "", x.removeprefix(f"{family} ")) for x in self.receipt["failures"]
                if x.startswith(f"{family} ")]

    def suite(self, family: str, tests: list[str], workers: int, card: int) -> subprocess.Popen:
        """Starts the tests on the kernels of one family."""
        return self.pytest(family, workers, "--dist", "loadgroup", "--family", family, *tests, **first(card))

    def tested_again(self, family: str, child: subprocess.Popen) -> None:
        _, _, results = self.results(family, child)
        for test in (result["test"] for result in results if result["outcome"] == "passed"):
            self.receipt["failures"].remove(f"{family} {test}")
            counts = self.receipt["suite"][family][Path(test.partition("::")[0]).name]
            counts["failed"], counts["passed"] = counts["failed"] - 1, counts["passed"] + 1
        self.receipt["rows"] |= outcomes_of_rows(results, family)

    def tested(self, family: str, files: list[str], child: subprocess.Popen) -> None:
        finished, collected, results = self.results(family, child)
        outcomes = defaultdict(Counter)
        for result in results:
            file = Path(result["test"].partition("::")[0]).name
            outcomes[file][result["outcome"]] += 1
            outcomes[file]["seconds"] += result["seconds"]
        of_family = self.receipt["suite"].setdefault(family, {})
        self.receipt["suite code"][family] = code_of(self.receipt, family)
        for file in files:
            counts = {key: round(outcomes[file][key]) for key in ("passed", "failed", "skipped", "seconds")}
            ran = counts["passed"] + counts["failed"] + counts["skipped"]
            if ran or finished:
                of_family[file] = {"finished": finished or ran == collected.get(file)} | counts
        again = tuple(f"{family} tests/{file}::" for file in files)
        self.receipt["failures"] = sorted({
            *(failure for failure in self.receipt["failures"] if not failure.startswith(again)),
            *(f"{family} {result['test']}" for result in results if result["outcome"] == "failed")})
        if "test_cuda.py" in files:
            self.receipt["rows"] |= outcomes_of_rows(results, family)

    def sanitizer(self, tool: str, names: list[str], card: int, workers: int) -> subprocess.Popen:
        """Starts compute-sanitizer over these rows.  Tests that would begin too late are skipped, so that it
        comes to its end and writes down what it found.  The oracle stays off the card: products of torch end
        with a hardware exception under racecheck."""
        for log in SCRATCH.glob(f"{tool}.*.log"):
            log.unlink()
        program = shutil.which("compute-sanitizer") or f"{_build.cuda_home()}/bin/compute-sanitizer"
        command = [program, "--tool", tool, "--log-file", f"{SCRATCH}/{tool}.%p.log", "--print-limit", "0",
                   "--target-processes", "all", "--report-api-errors", "no", "--show-backtrace", "no"]
        if tool != "initcheck":  # which must see who writes what our kernels read
            command += ["--kernel-name", "kns=flashattn"]
        time.sleep(3)  # of two that start at once one may end at once
        last = time.time() + self.end - time.monotonic() - MARGIN
        return self.pytest(tool, workers, "tests/test_cuda.py::test_row", "--oracle", "cpu", "--rows",
                           ",".join(names), "--until", str(last), before=command,
                           PYTORCH_NO_CUDA_MEMORY_CACHING="1", **first(card))

    def sanitized(self, tool: str, child: subprocess.Popen) -> None:
        finished, _, results = self.results(tool, child)
        text = "".join(log.read_text(errors="replace") for log in SCRATCH.glob(f"{tool}.*.log"))
        ledger = json.loads(LEDGER.read_text())[tool]
        faults = [" ".join(match.groups()) for match in FAULT.finditer(text)]
        unexplained = Counter(fault for fault in faults
                              if not any(re.search(line["fault"], fault) for line in ledger))
        print(tool, len(results), "results", len(faults), "reports", dict(unexplained.most_common(20)))
        before = self.receipt["sanitizers"].get(tool, {}).get("rows", {})
        kept = {name: code for name, code in before.items() if code == self.receipt["code"].get(name)}
        clean = {}
        if finished and "SUMMARY" in text and not unexplained:
            clean = {name: self.receipt["code"][name] for name in passed_rows(results)}
        self.receipt["sanitizers"][tool] = {
            "rows": dict(sorted((kept | clean).items())), "faults": dict(unexplained.most_common(20)),
            "failures": sorted(r["test"] for r in results if r["outcome"] == "failed")}


def cards() -> int:
    import torch

    return torch.cuda.device_count()


def first(card: int) -> dict[str, str]:
    """The variable that makes this card, modulo their number, the first of the visible ones for a child."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if visible == [""]:
        visible = [str(i) for i in range(cards())]
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[(card + i) % len(visible)] for i in range(len(visible)))}


def outcomes_of_rows(results: list[dict], family: str) -> dict[str, str]:
    """passed or failed for each row of the family that a test launched."""
    found: dict[str, str] = {}
    for result in results:
        test = re.search(rf"::test_row\[(\w+_{family}_\w+)-", result["test"])
        if test and result["outcome"] != "skipped" and found.get(test[1]) != "failed":
            found[test[1]] = result["outcome"]
    return found


def passed_rows(results: list[dict]) -> list[str]:
    """Rows all of whose tests passed."""
    outcomes = defaultdict(set)
    for result in results:
        if test := re.search(r"::test_row\[(\w+)-", result["test"]):
            outcomes[test[1]].add(result["outcome"])
    return [row for row, found in outcomes.items() if found == {"passed"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--families", nargs="+", default=_build.instances().CUDA_MODULES[::-1],
                        help="of the suite")
    parser.add_argument("--files", nargs="+", choices=SUITE, default=SUITE, help="of the suite")
    parser.add_argument("--again", action="store_true", help="of the suite: only the tests that failed")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--checkers", type=int, default=3, help="test processes of each sanitizer")
    parser.add_argument("--rows", default="", metavar="REGEX", help="of the sanitizers")
    parser.add_argument("--limit", type=float, default=7200, help="seconds for everything")
    parser.add_argument("--not-run", metavar="REASON", help="no card could be had for these sources")
    parser.add_argument("--card", help="with --not-run: its name")
    arguments = parser.parse_args()
    if arguments.not_run:
        receipt = {"card": arguments.card, "sources": digest(), "not run": arguments.not_run}
    else:
        import torch

        receipt = start(torch.cuda.get_device_name(0)) | environment()
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        run = Run(receipt, arguments.limit)
    try:
        if not arguments.not_run:
            run.parts(arguments.parts, arguments.families, list(arguments.files), arguments.again,
                      arguments.workers, arguments.checkers, arguments.rows)
    finally:
        receipt |= {"unverified": unverified(receipt), "unfinished": unfinished(receipt)}
        text = json.dumps(receipt, indent=1) + "\n"
        path_of(receipt["card"]).write_text(text)
        print(text)


if __name__ == "__main__":
    main()
