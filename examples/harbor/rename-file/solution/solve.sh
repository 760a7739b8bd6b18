#!/bin/bash
mv in.txt out.txt
