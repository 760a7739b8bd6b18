#!/bin/bash
echo lamp > out.txt
