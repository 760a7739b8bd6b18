"""Tests on the pretrained model that `make test` fetches."""
