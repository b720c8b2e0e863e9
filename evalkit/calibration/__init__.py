"""Calibration: the value of a method's knob that reaches a target, on text that no evaluation sample holds."""
