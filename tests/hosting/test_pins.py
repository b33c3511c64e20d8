"""What is pinned is pinned once."""

from __future__ import annotations

from bedplate.deploy.images import DYNAMO_VERSION, RAY_TAG
from bedplate.engines.vllm import CPU_RECIPE as VLLM_CPU
from bedplate.hosting import on_dynamo, on_ray


def pins(packages: tuple[str, ...]) -> dict[str, str]:
    return {name: version for name, _, version in (one.partition("==") for one in packages) if version}


def test_emitted_images_have_the_version_of_the_packages_that_are_run_here() -> None:
    assert RAY_TAG.startswith(f"{pins(on_ray.RECIPE.packages)['ray[serve]']}-")
    (bare,) = on_dynamo.ALONE.bare
    assert bare.partition("==")[2] == DYNAMO_VERSION


def test_dynamo_s_vllm_runs_on_the_torch_of_vllm_s_own_recipe() -> None:
    assert pins(on_dynamo.WITH_VLLM_CPU.packages)["torch"] == pins(VLLM_CPU.packages)["torch"]
