"""Every stage that is fitted has a module named as its kind or its file, in a package that fits it."""

import pytest

from kvq_calib.fit.scheme import SchemeFit, way
from kvq_runtime.fit.fitting import Fitting, fit_module, has_to_be_solved
from kvq_runtime.fit.statistics import Statistic
from kvq_runtime.recipe import ROLES, Recipe, Scheme, presets
from kvq_runtime.stages.stage import Stage


def stages(recipe: Recipe) -> list[Stage]:
    """The stages with tensors to find, of every scheme, in a layer with others underneath and in the first."""
    first = [scheme.predictor(0, role) for pair in recipe.pairs for role, scheme in zip(ROLES, pair, strict=True)]
    found = [stage for scheme in recipe.schemes for _, stage in scheme.stages] + [one for one in first if one]
    return [stage for stage in found if has_to_be_solved(stage)]


@pytest.mark.parametrize("fitting, online", [(SchemeFit, False), (Fitting, True)])
def test_every_fitted_stage_is_found_and_requests_what_can_be_collected(fitting, online):
    recipes = [recipe for recipe in presets().values() if recipe.fits_prompt == online]
    fitted = {stage for recipe in recipes for stage in stages(recipe)}
    assert len({stage.kind for stage in fitted}) >= (3 if online else 8)
    for stage in fitted:
        module = fit_module(stage, fitting.packages)
        for one in module.requests(stage):
            assert type(one).of_row is not Statistic.of_row if online else way(one).passes == one.passes, one
        assert callable(module.solve), stage


def test_a_stage_that_nobody_fits_is_named():
    scheme: Scheme = presets()["kvquant-3bit"].key
    with pytest.raises(ValueError, match=r"nuq cannot be fitted here: there is no kvq_runtime\.fit\.nuq"):
        fit_module(scheme.quantize, ["kvq_runtime.fit"])


def test_a_calibrations_own_fit_comes_before_the_runtimes():
    kmeans, scales = presets()["polar-paper-fitted"].key.quantize, presets()["zipcache-2bit"].value.quantize
    assert fit_module(kmeans, SchemeFit.packages).__name__ == "kvq_calib.fit.polar"
    assert fit_module(scales, SchemeFit.packages).__name__ == "kvq_runtime.fit.separable"
