from autodist.strategies import SyncedVariable, synced_variables


def test_variables_without_gradient_are_left_out(language_model):
    assert [variable.name for variable in synced_variables(language_model)] == [
        "embedding",
        "dense/kernel",
        "dense/bias",
    ]


def test_order_is_that_of_gradients_not_of_variables(step):
    planned = step({"a": (1,), "b": (2,)})
    reordered = type(planned)(planned.variables[::-1], planned.gradients)
    assert synced_variables(reordered) == synced_variables(planned)


def test_a_variable_with_two_gradients_appears_once(step):
    planned = step({"a": (1,), "b": (2,)})
    twice = type(planned)(planned.variables, planned.gradients + planned.gradients[:1])
    assert synced_variables(twice) == synced_variables(planned)


def test_a_dense_and_a_sparse_gradient_make_a_dense_variable(step):
    dense, sparse = step({"tied": (10, 4)}), step({"tied": (10, 4)}, sparse=["tied"])
    for gradients in (dense.gradients + sparse.gradients, sparse.gradients + dense.gradients):
        (variable,) = synced_variables(type(dense)(dense.variables, gradients))
        assert not variable.is_sparse
    (variable,) = synced_variables(type(dense)(dense.variables, sparse.gradients * 2))
    assert variable.is_sparse


def test_row_bytes_are_those_of_one_index_of_the_first_axis():
    assert SyncedVariable("table", (10, 4, 2), 320, True).row_bytes == 32
    assert SyncedVariable("scalar", (), 4, False).row_bytes == 4
    assert SyncedVariable("empty", (0, 4), 0, True).row_bytes == 0
