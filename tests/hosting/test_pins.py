"""Each pinned version is defined once."""

from __future__ import annotations

from bedplate.deploy.images import DYNAMO_VERSION, RAY_TAG
from bedplate.engines.vllm import CPU_RECIPE as VLLM_CPU
from bedplate.hosting import on_dynamo, on_ray


def read_pins(packages: tuple[str, ...]) -> dict[str, str]:
    return {name: version for name, _, version in (one.partition("==") for one in packages) if version}


def test_image_versions_equal_package_versions() -> None:
    assert RAY_TAG.startswith(f"{read_pins(on_ray.RECIPE.packages)['ray[serve]']}-")
    (bare,) = on_dynamo.ALONE.bare
    assert bare.partition("==")[2] == DYNAMO_VERSION


def test_dynamo_recipe_pins_the_torch_of_the_vllm_recipe() -> None:
    assert read_pins(on_dynamo.WITH_VLLM_CPU.packages)["torch"] == read_pins(VLLM_CPU.packages)["torch"]
