"""Skips tests of Aim without Aim: its storage engine has no wheels for Python 3.13 and later."""

import sys

collect_ignore = ["test_aim.py"] if sys.version_info >= (3, 13) else []
