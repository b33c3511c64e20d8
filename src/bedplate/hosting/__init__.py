"""Running services: a host that owns a gateway and its engines, its records, and how other processes ask it."""
