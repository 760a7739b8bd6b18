"""Fixtures of the tests that compare with other frameworks: their anchors, imported when the first test asks."""

from __future__ import annotations

import importlib

import pytest
import torch


@pytest.fixture(scope="session")
def trl():
    return importlib.import_module("tests.losses.anchors.trl_anchor")


@pytest.fixture(scope="session")
def liger():
    return importlib.import_module("tests.losses.anchors.liger_anchor")


@pytest.fixture(scope="session")
def verl():
    return importlib.import_module("tests.losses.anchors.verl_anchor")


@pytest.fixture(scope="session")
def torch_head():
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip(f"torch {torch.__version__} has no linear_cross_entropy")
    return importlib.import_module("tests.losses.anchors.torch_anchor")
