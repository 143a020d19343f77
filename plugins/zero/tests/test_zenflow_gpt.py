@pytest.mark.slow
def test_loss_of_the_quickstart(late: bool = True) -> None:
    plain, flow = run_ranks(1, losses, [{}, {"zenflow": {"update_interval": 4, "overlap_step": late}}], STEPS)[0]
    assert flow == pytest.approx(plain, rel=0.01)
