"""The generator's process: see `apart`."""

from bedplate.measure.load.apart import main

main()
