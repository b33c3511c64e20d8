"""The process of the load generator; see `apart`."""

from bedplate.measure.load.separate_process import main

main()
