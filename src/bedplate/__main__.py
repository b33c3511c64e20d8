from bedplate.cli import main
from bedplate.interrupts import forget_interrupts

if __name__ == "__main__":
    try:
        main()
    finally:
        forget_interrupts()
