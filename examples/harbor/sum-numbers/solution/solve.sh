#!/bin/bash
awk '{ sum += $1 } END { print sum }' in.txt > out.txt
