from ds_core.entries import CommandEntry


def ds_commands():
    return {"greet": CommandEntry("my_greeting.command:greet", "Say hello.")}
