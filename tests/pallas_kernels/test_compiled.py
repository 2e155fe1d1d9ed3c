"""One case of every op through the TPU compiler at K3's real size; `make tpu-aot` compiles all cases for all chips."""

import pytest

from pallas_kernels.aot import estimate
from pallas_kernels.aot.__main__ import all_cases, bench_of

CASES = all_cases()
needs_libtpu = pytest.mark.skipif(estimate.why_not("v5p") is not None, reason=str(estimate.why_not("v5p")))


def with_a_tpu_kernel(op):
    return [name for name, case in CASES[op].items() if "tpu" in case.impls]


@needs_libtpu
@pytest.mark.parametrize("op", [op for op in CASES if with_a_tpu_kernel(op)])
def test_the_first_case_of_an_op_compiles_for_v5p_as_on_record(op):
    (result,) = estimate.estimates(bench_of(op), "v5p", [(with_a_tpu_kernel(op)[0], "tpu")])
    assert estimate.regressions(estimate.read_record(bench_of(op), "v5p"), [result]) == []
    assert result["cycles"] > 0 and result["kernels"]


@pytest.mark.parametrize("op", CASES)
def test_a_record_knows_only_cases_that_exist(op):
    for chip in estimate.TPUS:
        for name in estimate.read_record(bench_of(op), chip):
            case, impl = name.split()
            assert impl in CASES[op][case].impls
