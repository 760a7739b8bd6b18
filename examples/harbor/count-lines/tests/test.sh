#!/bin/bash
# The reward is 1 if the file is right, and 0 if it is not.
if cmp -s out.txt /tests/expected.txt; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
