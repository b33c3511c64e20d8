"""Writes a plan as deployment files for a target platform. Pure text: nothing is started."""
