"""One case of every op through the TPU compiler at K3's real size; `make tpu-aot` compiles all cases for all chips."""

import json

import pytest

from pallas_kernels.aot import estimate
from pallas_kernels.aot.__main__ import all_cases, bench_of
from pallas_kernels.aot.chips import GPUS, TPUS

CASES = all_cases()
needs_libtpu = pytest.mark.skipif(estimate.why_not("v5p") is not None, reason=str(estimate.why_not("v5p")))


@needs_libtpu
@pytest.mark.parametrize("op", [op for op, cases in CASES.items() if any("tpu" in case.impls for case in cases.values())])
def test_the_first_case_of_an_op_compiles(op):
    name = next(name for name, case in CASES[op].items() if "tpu" in case.impls)
    (result,) = estimate.estimates(bench_of(op), "v5p", [(name, "tpu")], dump=False)
    assert "error" not in result and result["compile_s"] > 0


@pytest.mark.parametrize("op", CASES)
def test_a_record_knows_only_cases_that_exist(op):
    for path in (estimate.record_path(bench_of(op), chip) for chip in (*TPUS, *GPUS)):
        for compiler in json.loads(path.read_text()).values() if path.exists() else ():
            for name in compiler["cases"]:
                case, impl = name.split()
                assert impl in CASES[op][case].impls
