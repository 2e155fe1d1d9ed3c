"""Laws of the estimator: loops count by their trips, operands do not count, records catch what grew, the compiler answers."""

import json
import threading

import jax.numpy as jnp
import pytest

from pallas_kernels.aot import estimate, hlo, schedule
from pallas_kernels.aot.bench import compile_for, measure
from pallas_kernels.aot.case import Case
from pallas_kernels.aot.chips import TPUS, roofline

PROGRAM = """HloModule jit_f

%body (p: f32[8]) -> f32[8] {
  ROOT %kernel.1 = f32[8] custom-call(%p), backend_config={"estimated_cycles":"100"}
}

%cheap (p: f32[8]) -> f32[8] {
  ROOT %one = f32[8] fusion(%p), backend_config={"estimated_cycles":"1"}
}

%dear (p: f32[8]) -> f32[8] {
  ROOT %two = f32[8] fusion(%p), backend_config={"estimated_cycles":"7"}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %made = f32[8] fusion(%x), metadata={op_name="jit(f)/operands/add"}, backend_config={"estimated_cycles":"5000"}
  %laid_out = f32[8] copy(%x), metadata={op_name="arguments[1]"}, backend_config={"estimated_cycles":"3000"}
  %gather = f32[8] fusion(%x), backend_config={"estimated_cycles":"9223372036854775807"}
  %loop = f32[8] while(%made), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"16"}}
  %choice = f32[8] conditional(%i, %x, %x), branch_computations={%cheap, %dear}
  ROOT %last = f32[8] fusion(%loop, %choice), backend_config={"estimated_cycles":"20"}
}
"""


def test_cycles_count_loops_by_trips_and_leave_out_operands_and_unknown_ones():
    assert hlo.cycles_by_operation(PROGRAM) == {"kernel.1": 1600, "two": 7, "last": 20}


def test_kernels_that_the_compiler_could_not_follow_are_named():
    def call(name, cycles):
        return f'  %{name} = f32[8] custom-call(%x), custom_call_target="tpu_custom_call", backend_config={{{cycles}}}\n'

    text = call("a.1", '"estimated_cycles":"0"') + call("b", '"estimated_cycles":"5"') + call("c", "")
    assert hlo.kernels_without_cycles(text + PROGRAM) == ["a.1", "c"]


def test_the_line_that_tells_why_a_process_ended():
    fatal = "W0101 text\nF1203 16:35:50.564434 8111 module.cc:66] Check failed: it is not OK \n*** stack\nE1203 RAW: raising\n"
    assert estimate.gist(fatal) == "Check failed: it is not OK"
    assert estimate.gist("Traceback:\nImportError: no such module\n\n") == "ImportError: no such module"
    assert estimate.gist("") == "it said nothing"


def test_figures_below_the_time_of_the_arithmetic_are_not_believed(monkeypatch, tmp_path):
    """Nor recorded; and only cases on record are estimated where that is asked for."""
    monkeypatch.setattr(estimate, "record_path", lambda module, chip: tmp_path / f"{chip}.json")
    monkeypatch.setattr(estimate, "why_not", lambda chip: None)
    monkeypatch.setattr(estimate, "compiler", lambda chip: "libtpu 1")
    asked = []

    def estimates(module, chip, jobs, *, dump=True):
        asked.extend((case, dump) for case, _ in jobs)
        for case, impl in jobs:
            yield figures(1000) | {"case": case, "impl": impl} if dump else {"case": case, "impl": impl}

    monkeypatch.setattr(estimate, "estimates", estimates)
    clock, peak = TPUS["v5p"].clock, TPUS["v5p"].bf16
    cases = {name: Case(build, share * 1000 / clock * peak, 1.0) for name, share in (("good", 0.5), ("bad", 2.0))}
    compile_for(["v5p"], "op", cases, record=True)
    assert asked == [("good", True), ("bad", True)]
    assert list(estimate.read_record("op", "v5p")) == ["good tpu"]
    asked.clear()
    assert compile_for(["v5p"], "op", cases, only_recorded=True) == []
    assert asked == [("good", True), ("bad", False)]


def test_a_schedule_is_read_with_its_spills_and_its_vmem(tmp_path):
    (tmp_path / "1-mm.1-01-final_hlo-static-per-bundle-utilization.txt").write_text(
        "== CAPACITY:\nMXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU\n"
        "4 3 4 2 1 3 3 1 1 2\n== UTILIZATION:\n4 0 2 0 0 3 1 0 0 0\n0 0 2 0 0 0 0 1 2 0\n"
    )
    (tmp_path / "1-mm.1-00-pre-finalize.txt").write_text(
        "#allocation1 [shape = 'u8[16]', space=vmem, size = 0x10, scoped]\n"
        "#allocation2 [shape = 'u8[8]', space=smem, size = 0x8]\n"
    )
    found = schedule.read(tmp_path, "mm.1")
    assert found is not None
    assert (found.bundles, found.spills, found.vmem) == (2, 3, 16)
    assert found.occupancy["MXU"] == 0.5 and found.occupancy["VALU"] == 0.5 and not any(":" in unit for unit in found.occupancy)
    assert schedule.read(tmp_path, "other") is None


def build(impl):
    raise NotImplementedError


def figures(cycles, spills=0):
    kernel = {"bundles": 1, "occupancy": {"MXU": 0.5}, "spills": spills, "vmem": 1}
    return {"case": "k3", "impl": "tpu", "cycles": cycles, "temp_bytes": 0, "kernels": {"a": kernel}}


def test_a_record_catches_more_cycles_new_spills_and_failures():
    recorded = {"k3 tpu": figures(1000)}
    assert estimate.regressions(recorded, [figures(1090)]) == []
    assert "cycles 1200, on record 1000" in estimate.regressions(recorded, [figures(1200)])[0]
    assert "spills 1, on record 0" in estimate.regressions(recorded, [figures(1000, spills=1)])[0]
    assert "no room" in estimate.regressions({}, [{"case": "k3", "impl": "tpu", "error": "no room"}])[0]


def test_a_record_keeps_the_figures_of_each_compiler_and_case(tmp_path, monkeypatch):
    monkeypatch.setattr(estimate, "record_path", lambda module, chip: tmp_path / "estimates" / f"{chip}.json")
    for libtpu, cycles in (("1", 10), ("2", 20)):
        monkeypatch.setattr(estimate, "compiler", lambda chip, libtpu=libtpu: f"libtpu {libtpu}")
        estimate.write_record("op", "v5p", [figures(cycles)])
        estimate.write_record("op", "v5p", [figures(5) | {"case": "small"}])
        assert estimate.read_record("op", "v5p")["k3 tpu"]["cycles"] == cycles
    assert set(json.loads((tmp_path / "estimates" / "v5p.json").read_text())) == {"libtpu 1", "libtpu 2"}
    assert estimate.read_record("op", "v6e") == {}


def test_a_roofline_is_the_slower_of_arithmetic_and_traffic():
    chip = TPUS["v5p"]
    assert roofline(chip, flops=459e12, bytes_moved=1) == 1
    assert roofline(chip, flops=1, bytes_moved=2 * 2.77e12) == 2


def test_times_come_with_the_temporary_memory():
    seconds, megabytes = measure(lambda x: x @ x @ x, [jnp.ones((64, 64))], repeats=2)
    assert seconds > 0 and megabytes >= 64 * 64 * 4 / 1e6


def test_a_job_that_the_compiler_does_not_survive_is_compiled_without_figures_and_the_others_with(monkeypatch):
    """Job "b" ends the process while figures are written, and job "c" in any case."""

    def process(module, chip, jobs, dump):
        for case, impl in jobs:
            if case == "c" or dump and case == "b":
                yield "crashed"
                return
            yield {"case": case, "impl": impl, "dump": dump}

    monkeypatch.setattr(estimate, "_compiled", process)
    a, b, c, d = estimate.estimates("op", "v5p", [(case, "tpu") for case in "abcd"])
    assert a["dump"] and d["dump"] and "note" not in a
    assert not b["dump"] and b["note"] == "no estimate: crashed"
    assert c["error"] == "crashed"


def test_a_watch_rings_once_time_is_up_and_not_when_it_is_restarted_or_stopped():
    rung = threading.Event()
    watch = estimate.Watch(rung.set, 0.05)
    assert rung.wait(5) and watch.rang
    quiet = estimate.Watch(rung.clear, 60)
    quiet.restart()
    quiet.stop()
    assert not quiet.rang and rung.is_set()


@pytest.mark.skipif(estimate.why_not("v5p") is not None, reason=str(estimate.why_not("v5p")))
@pytest.mark.parametrize("chip", ["v5p", "v6e", "tpu7x"])
def test_the_compiler_answers_for_a_chip_that_is_not_here(chip, tmp_path, monkeypatch):
    (tmp_path / "product.py").write_text(
        "import jax.numpy as jnp\nfrom pallas_kernels.aot.case import Case, array\n"
        "build = lambda impl: (jnp.dot, (array(256, 256, dtype=jnp.bfloat16),) * 2)\n"
        "broken = lambda impl: (jnp.dot, (array(256, 256, dtype=jnp.bfloat16), array(8, 8, dtype=jnp.bfloat16)))\n"
        "CASES = {'good': Case(build, 1, 1), 'bad': Case(broken, 1, 1)}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    good, bad = sorted(estimate.estimates("product", chip, [("good", "xla"), ("bad", "xla")]), key=lambda r: r["case"] == "bad")
    assert good.get("cycles", 0) > 0 or "ended the process" in good["note"]
    assert "dot" in bad["error"]
