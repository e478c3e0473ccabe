"""The serial fraction of exact curves comes back; what no law describes is told."""

import pytest

from jaxdist.bench.laws import amdahl, fit_amdahl, fit_gustafson, gustafson

COUNTS = (1, 2, 4, 8, 64)
FRACTIONS = (0.0, 1e-6, 0.05, 0.5, 1.0)


@pytest.mark.parametrize(("law", "fit"), [(amdahl, fit_amdahl), (gustafson, fit_gustafson)])
@pytest.mark.parametrize("serial", FRACTIONS)
def test_an_exact_curve_gives_its_fraction_back(law, fit, serial):
    found = fit([(n, law(serial, n)) for n in COUNTS])
    assert found.serial == pytest.approx(serial, abs=1e-9)
    assert found.residual == pytest.approx(0, abs=1e-9)
    assert not found.bounded
    assert found.name.lower() == law.__name__


def test_the_laws_are_those_of_their_papers():
    assert amdahl(0.05, 20) == pytest.approx(10.256, abs=1e-3)
    assert amdahl(0.01, 1e12) == pytest.approx(100, rel=1e-6)  # 1/s is the limit
    assert gustafson(0.004, 1024) == pytest.approx(1020, abs=0.1)  # Gustafson 1988 reports 1016 to 1021
    assert amdahl(0.3, 1) == gustafson(0.3, 1) == 1


@pytest.mark.parametrize("fit", [fit_amdahl, fit_gustafson])
def test_a_fraction_outside_0_to_1_is_told(fit):
    slower, faster = fit([(1, 1.0), (2, 0.5), (4, 0.4)]), fit([(1, 1.0), (2, 2.5), (4, 6.0)])
    assert (slower.serial, slower.bounded) == (1.0, True)
    assert (faster.serial, faster.bounded) == (0.0, True)
    assert slower.residual > 0.1


def test_the_residual_is_a_root_mean_square():
    assert fit_gustafson([(1, 1.0), (3, 2.0), (3, 2.4)]).serial == pytest.approx(0.4)
    assert fit_gustafson([(1, 1.0), (3, 2.0), (3, 2.4)]).residual == pytest.approx(0.2)


def test_one_number_of_devices_has_no_fraction():
    with pytest.raises(ValueError, match="measure two or more counts"):
        fit_amdahl([(1, 1.0)])
