"""Runs the program that the variable PROGRAM names, in this process: one launcher serves them all."""

import os
import runpy

runpy.run_path(os.environ["PROGRAM"], run_name="__main__")
