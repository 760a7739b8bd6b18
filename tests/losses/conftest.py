"""Fixtures of the tests that compare with other frameworks: their anchors, imported when the first test asks."""

from __future__ import annotations

import importlib

import pytest


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
    return importlib.import_module("tests.losses.anchors.torch_anchor")
