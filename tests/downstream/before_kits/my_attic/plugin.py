from ds_core.entries import StateStoreEntry


def ds_state_stores():
    return {"attic": StateStoreEntry("my_attic.store:Attic")}
