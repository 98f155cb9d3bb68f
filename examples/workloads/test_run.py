"""Tests of run.py with workloads that only pretend: `python3 -m unittest` in this folder. Standard library only."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest

import figures
import run

HERE = os.path.dirname(os.path.abspath(__file__))
# A workload that takes no time: twice as fast when TUNED is set; what else it does, its subclass in a test says.
FAKE = """
import json, os, sys, time
name = os.path.basename(sys.argv[0])[:-3]
tuned = bool(os.environ.get("TUNED"))
if "--prepare" in sys.argv:
    open(sys.argv[sys.argv.index("--scratch") + 1] + "/" + name, "w").close()
    sys.exit(0)
line = dict(schema="cmt/workload/1", workload=name, device="cpu", gpu=None, engine="a fake", reproduces=None, notes=[],
    checksum="same", checked_bytes=8, outputs=None, wrong=[], series=[
        dict(name="step", seconds=[0.50, 0.51, 0.52] if tuned else [1.0, 1.01, 1.02], htod_bytes=1000, dtoh_bytes=0, headline=True),
        dict(name="other", seconds=[0.1, 0.1, 0.1], htod_bytes=0, dtoh_bytes=1000, headline=False)])
code = 0
{more}
print("a line of some library")
print(json.dumps(line))
sys.exit(code)
"""
# A cmt that writes down how it was called, and runs the command.
FAKE_CMT = """#!/bin/sh
[ "$1" = --version ] && { echo cmt 0.0.0; exit 0; }
echo "$@" >> "$(dirname "$0")/called"
case "$*" in *nonsense*) printf "error: no such search\\n\\nTry --help.\\n" >&2; exit 2 ;; esac
while [ "$1" != -- ]; do
    [ "$1" = --json ] && echo '{"schema": "cmt/run/1", "staged": [{"bytes": 3000000000}, {"bytes": 0}], "errors": 0}' > "$2"
    shift
done
shift
TUNED=1 exec "$@"
"""


class Figures(unittest.TestCase):
    def test_quantiles_are_linear_between_neighbours(self):
        self.assertEqual(figures.quantile([4, 1, 3, 2], 0.5), 2.5)
        self.assertEqual(figures.quantile([1, 2, 3, 4, 5], 0.1), 1.4)
        self.assertEqual(figures.quantile([7], 0.9), 7)

    def test_a_clear_gain_is_faster_and_its_reverse_slower(self):
        stock, tuned = [[1.0, 1.1], [1.05, 1.0], [1.0]], [[0.5, 0.55], [0.5, 0.52], [0.51]]
        found = figures.compare(stock, tuned)
        self.assertEqual(found["verdict"], "faster")
        self.assertAlmostEqual(found["speedup"], 1.0 / 0.51)
        self.assertLess(found["low"], found["speedup"])
        self.assertGreater(found["high"], found["speedup"])
        self.assertEqual(figures.compare(tuned, stock)["verdict"], "slower")

    def test_the_same_machine_twice_is_noise(self):
        draw = random.Random(1)
        verdicts = []
        for _ in range(200):
            # Processes differ more than samples of one process do.
            sides = [[draw.gauss(1, 0.1) for _ in range(3)] for _ in range(2)]
            rounds = [[[draw.gauss(middle, 0.02) for _ in range(5)] for middle in side] for side in sides]
            verdicts.append(figures.compare(*rounds)["verdict"])
        self.assertGreaterEqual(verdicts.count("within noise"), 170)

    def test_a_gain_in_every_turn_is_noise_if_rounds_differ_as_much(self):
        stock, tuned = [[1.0] * 3, [1.5] * 3, [2.0] * 3], [[0.9] * 3, [1.35] * 3, [1.8] * 3]
        self.assertEqual(figures.compare(stock, tuned)["verdict"], "within noise")

    def test_a_gain_below_the_floor_is_noise_however_steady(self):
        self.assertEqual(figures.compare([[1.02] * 5] * 3, [[1.0] * 5] * 3)["verdict"], "within noise")

    def test_a_gain_in_all_rounds_but_one_is_noise(self):
        stock, tuned = [[1.0] * 3] * 9, [[0.5] * 3] * 8 + [[1.2] * 3]
        self.assertGreater(figures.compare(stock, tuned)["low"], 1)
        self.assertEqual(figures.compare(stock, tuned)["verdict"], "within noise")
        self.assertEqual(figures.compare(tuned, stock)["verdict"], "within noise")

    def test_few_samples_say_nothing(self):
        self.assertEqual(figures.compare([[1.0], [1.0]], [[0.1], [0.1]])["verdict"], "too few samples")
        self.assertEqual(figures.compare([[1.0] * 9] * 2, [[0.1] * 9] * 2)["verdict"], "too few samples")
        self.assertEqual(figures.compare([[1.0]], []), figures.NOT_COMPARED)

    def test_a_round_that_only_stock_made_is_left_out(self):
        found = figures.compare([[1.0] * 3, [1.0] * 3, [9.0] * 3], [[0.5] * 3, [0.5] * 3])
        self.assertEqual((found["speedup"], found["by_round"]), (2.0, [2.0, 2.0]))

    def test_times_have_three_digits_and_a_unit(self):
        shown = [figures.duration(seconds) for seconds in (12.34, 1.0, 0.99999, 0.0305, 0.0009999, 3.2e-6)]
        self.assertEqual(shown, ["12.3 s", "1.00 s", "1.00 s", "30.5 ms", "1.00 ms", "3.20 us"])


class Run(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def workload(self, name, more=""):
        with open(self.path(name + ".py"), "w") as file:
            file.write(FAKE.replace("{more}", textwrap.dedent(more)))

    def command(self, only, *more, prefix="env TUNED=1"):
        tuned = [] if prefix is None else ["--tuned-prefix", prefix]
        return [
            *(sys.executable, os.path.join(HERE, "run.py"), "--folder", self.folder.name, "--only", only),
            *("--device", "cpu", "--scale", "small", "--json", self.path("out.json"), "--html", self.path("out.html")),
            *tuned,
            *more,
        ]

    def run_it(self, only, *more, **how):
        """Exit code, standard output, standard error, and the report if it was written."""
        done = subprocess.run(self.command(only, *more, **how), capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr, self.report()

    def report(self):
        if not os.path.exists(self.path("out.json")):
            return None
        with open(self.path("out.json")) as file:
            return json.load(file)

    def test_a_gain_is_reported_in_all_three_forms(self):
        self.workload("tensor_to", "line['notes'] = ['a long note ' * 20]; line['reproduces'] = 'some engine ' * 20")
        code, out, _, report = self.run_it("tensor_to")
        self.assertEqual(code, 0, out)
        self.assertEqual(report["schema"], "cmt/workloads/1")
        step, other = report["workloads"][0]["series"]
        self.assertEqual((step["verdict"], other["verdict"]), ("faster", "within noise"))
        self.assertAlmostEqual(step["speedup"], 1.01 / 0.51)
        self.assertEqual([len(one) for one in step["stock"]["rounds_s"]], [3, 3, 3])
        self.assertRegex(out, r"tensor_to +1\.01 s 1\.00-1\.02 +510 ms 500-520 +1\.98x faster")
        self.assertEqual([line for line in out.splitlines() if len(line) > 80], [])
        with open(self.path("out.html")) as file:
            page = file.read()
        self.assertIn("1.98×", page)
        self.assertIsNone(re.search(r"https?://|<script|<link|<img", page))

    def test_stock_and_tuned_take_turns(self):
        self.workload("tensor_to", f"open({self.path('turns')!r}, 'a').write('T' if tuned else 'S')")
        self.run_it("tensor_to", "--rounds", "4")
        with open(self.path("turns")) as file:
            self.assertEqual(file.read(), "STSTSTST")

    def test_what_was_slower_is_said_even_beside_a_gain(self):
        self.workload("tensor_to", "line['series'][1]['seconds'] = [0.3 if tuned else 0.1] * 3")
        code, out, _, report = self.run_it("tensor_to")
        self.assertEqual(code, 0)
        self.assertEqual(report["workloads"][0]["slower_in"], ["other"])
        self.assertIn("slower in: other", out)

    def test_other_data_when_tuned_is_wrong_data(self):
        self.workload("tensor_to", "line['checksum'] = 'other' if tuned else 'same'")
        self.workload("offload")
        code, out, _, report = self.run_it("tensor_to,offload")
        self.assertEqual(code, 1)
        self.assertIn("WRONG DATA: checksums differ: stock same, tuned other", " ".join(out.split()))
        self.assertEqual([one["verdict"] for one in report["workloads"]], ["WRONG DATA", "faster"])
        with open(self.path("out.html")) as file:
            self.assertIn("WRONG DATA", file.read())

    def test_other_data_in_one_round_is_wrong_data(self):
        self.workload(
            "tensor_to",
            f"""
            flag = {self.path("once")!r}
            if tuned and not os.path.exists(flag):
                open(flag, "w").close()
                line["checksum"] = "other"
        """,
        )
        code, _, _, report = self.run_it("tensor_to")
        self.assertEqual((code, report["workloads"][0]["verdict"]), (1, "WRONG DATA"))

    def test_wrong_data_that_the_workload_found_is_wrong_data(self):
        self.workload("tensor_to", "if tuned: line['wrong'] = ['1 GiB back']; code = 3")
        code, out, _, _ = self.run_it("tensor_to")
        self.assertEqual(code, 1)
        self.assertIn("WRONG DATA: tuned: 1 GiB back", out)

    def test_a_workload_that_fails_loses_nothing_of_the_others(self):
        self.workload("tensor_to", "if tuned: sys.exit('cudaErrorTeapot')")
        self.workload("checkpoint", "os.kill(os.getpid(), 11)")
        self.workload("activations", "print('hello'); sys.exit(0)")
        self.workload("offload")
        code, out, _, report = self.run_it("tensor_to,checkpoint,activations,offload")
        self.assertEqual(code, 1)
        self.assertEqual([one["verdict"] for one in report["workloads"]], ["failed", "failed", "failed", "faster"])
        errors = [one["error"] for one in report["workloads"]]
        self.assertEqual(errors[0], "tuned, round 1: exit code 1: cudaErrorTeapot")
        self.assertIn("ended by signal 11 (Segmentation fault)", errors[1])
        self.assertIn("no result", errors[2])
        self.assertIn("offload", out)
        self.assertEqual(report["workloads"][0]["series"][0]["stock"]["samples"], 3)

    def test_a_workload_that_hangs_is_ended_with_its_children(self):
        self.workload(
            "tensor_to",
            f"""
            import subprocess
            child = subprocess.Popen(["sh", "-c", "trap '' INT; exec sleep 600"])
            time.sleep(0.5)  # until it ignores Ctrl-C
            open({self.path("child")!r}, "w").write(str(child.pid))
            time.sleep(600)
        """,
        )
        code, out, _, _ = self.run_it("tensor_to", "--timeout", "2")
        self.assertEqual(code, 1)
        self.assertIn("did not end within 2 s", out)
        self.assert_ended()

    def assert_ended(self):
        with open(self.path("child")) as file:
            pid = int(file.read())
        for _ in range(200):
            try:
                with open(f"/proc/{pid}/stat") as file:
                    if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                        return
            except FileNotFoundError:
                return
            time.sleep(0.1)
        self.fail(f"process {pid} is still there")

    def test_ctrl_c_keeps_what_there_is(self):
        self.workload("tensor_to")
        self.workload(
            "offload",
            f"""
            if tuned:
                open({self.path("child.part")!r}, "w").write(str(os.getpid()))
                os.rename({self.path("child.part")!r}, {self.path("child")!r})
                time.sleep(600)
        """,
        )
        # Whoever started the tests may have ignored it, as a shell's `&` does.
        running = subprocess.Popen(
            self.command("tensor_to,offload,checkpoint"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        for _ in range(300):
            if os.path.exists(self.path("child")):
                break
            time.sleep(0.1)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=30)
        self.assertEqual(running.returncode, 130, err)
        report = self.report()
        self.assertTrue(report["interrupted"])
        self.assertEqual([one["name"] for one in report["workloads"]], ["tensor_to", "offload"])
        self.assertEqual(report["workloads"][0]["verdict"], "faster")
        self.assertEqual(report["workloads"][1]["series"][0]["stock"]["samples"], 3)
        self.assertIn("interrupted", out)
        self.assertNotIn("Traceback", err)
        self.assert_ended()

    def test_cmt_gets_its_options_and_its_report_is_kept(self):
        self.workload("tensor_to")
        self.cmt()
        more = ("--cmt", self.path("cmt"), "--search", "instant", "--profile", "h200.json")
        code, out, _, report = self.run_it("tensor_to", *more, prefix=None)
        self.assertEqual(code, 0, out)
        called = self.called()
        # Once with a program that does nothing, so that no workload has to search.
        self.assertEqual(len(called), 4)
        self.assertTrue(called.pop(0).endswith(" -c "), called)
        self.assertRegex(
            called[0], r"^tune --quiet --json \S+ --search instant --profile h200.json -- \S+python\S* \S+tensor_to.py "
        )
        self.assertEqual([one["schema"] for one in report["workloads"][0]["tune"]], ["cmt/run/1"] * 3)
        self.assertEqual(report["machine"]["cmt"], "cmt 0.0.0")
        self.assertIn("cmt staged 3.00 GB in a tuned run", out)

    def test_a_cmt_that_cannot_run_anything_is_said_before_anything_runs(self):
        self.workload("tensor_to")
        self.cmt()
        more = ("--cmt", self.path("cmt"), "--profile", "nonsense")
        code, out, err, report = self.run_it("tensor_to", *more, prefix=None)
        self.assertEqual((code, out, report), (1, "", None))
        self.assertRegex(
            err, "cannot run even a program that does nothing: exit code 2: error: no such search; nothing was run"
        )
        self.assertNotIn("round 1", err)

    def cmt(self):
        with open(self.path("cmt"), "w") as file:
            file.write(FAKE_CMT)
        os.chmod(self.path("cmt"), 0o755)

    def called(self):
        with open(self.path("called")) as file:
            return file.read().splitlines()

    def test_a_cmt_that_reports_nothing_is_told_of_even_if_an_earlier_one_did(self):
        self.workload("tensor_to")
        os.mkdir(self.path("scratch"))
        for index in range(3):
            with open(self.path(f"scratch/tune-tensor_to-{index}.json"), "w") as file:
                file.write('{"schema": "cmt/run/1", "staged": [], "errors": 0}')
        more = ("--scratch", self.path("scratch"))
        _, out, _, _ = self.run_it("tensor_to", *more, prefix="env TUNED=1 JSON={json}")
        self.assertIn("cmt wrote no report", out)

    def test_a_cmt_that_staged_nothing_is_told_of(self):
        self.assertIn(
            "no different from stock", run.staged([{"schema": "cmt/run/1", "staged": [{"bytes": 0}], "errors": 0}])
        )
        broken = {"schema": "cmt/run/1", "staged": [{"bytes": 10**9}], "errors": 2}
        self.assertEqual(run.staged([broken, None]), "cmt staged 1.00 GB in a tuned run, WITH 2 ERRORS")

    def test_no_cmt_is_said_before_anything_runs(self):
        code, out, err, report = self.run_it("tensor_to", "--cmt", "/nowhere/cmt", prefix=None)
        self.assertEqual((code, out, report), (1, "", None))
        self.assertIn("no program /nowhere/cmt; nothing was run", err)

    def test_files_are_prepared_once_and_left_in_a_folder_of_the_users(self):
        self.workload("experts")
        os.mkdir(self.path("scratch"))
        code, _, err, _ = self.run_it("experts", "--scratch", self.path("scratch"))
        self.assertEqual(code, 0)
        self.assertEqual(err.count("preparing its file"), 1)
        self.assertTrue(os.path.exists(self.path("scratch/experts")))

    def test_results_that_could_not_be_written_are_refused_before_anything_runs(self):
        self.workload("tensor_to")
        code, _, err, _ = self.run_it("tensor_to", "--html", self.path("nowhere/out.html"))
        self.assertEqual(code, 2)
        self.assertIn("nowhere/out.html: cannot be written there; nothing was run", err)
        self.assertNotIn("round 1", err)

    def test_an_unknown_workload_is_a_usage_error(self):
        code, _, err, _ = self.run_it("tensor_two")
        self.assertEqual(code, 2)
        self.assertIn("no workload 'tensor_two'", err)

    def test_every_workload_has_its_script(self):
        self.assertEqual([name for name in run.WORKLOADS if not os.path.exists(os.path.join(HERE, name + ".py"))], [])


if __name__ == "__main__":
    unittest.main()
