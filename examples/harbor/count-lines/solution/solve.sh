#!/bin/bash
wc -l < in.txt > out.txt
