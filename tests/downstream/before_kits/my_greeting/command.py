def greet(name: str = "world") -> None:
    print(f"hello {name}")
