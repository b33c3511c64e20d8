"""The process of the load generator; see `apart`."""

from bedplate.measure.load.apart import main

main()
