from autodist.sharding import Mesh

MESH = Mesh.of({"data": 2, "model": 3})


def test_the_last_axis_varies_fastest():
    assert MESH.coordinates[0] == {"data": 0, "model": 0}
    assert MESH.coordinates[2] == {"data": 0, "model": 2}
    assert MESH.coordinates[3] == {"data": 1, "model": 0}


def test_a_row_differs_on_its_axes_only():
    assert MESH.row(4, ["model"]) == (3, 4, 5)
    assert MESH.row(4, ["data"]) == (1, 4)
    assert MESH.row(4, []) == (4,)


def test_the_order_of_a_row_is_that_of_the_parts():
    assert MESH.row(0, ["model", "data"]) == (0, 3, 1, 4, 2, 5)
    assert [MESH.index(place, ["model", "data"]) for place in MESH.row(0, ["model", "data"])] == [0, 1, 2, 3, 4, 5]


def test_places_may_be_listed():
    mesh = Mesh.of({"x": 2}, places=[1, 0])
    assert mesh != Mesh.of({"x": 2}, places=[0, 1]) == Mesh.of({"x": 2})
    assert mesh.coordinates[1] == {"x": 0}
    assert str(mesh) == "{x: 2} over 1, 0"


def test_a_mesh_without_axes_is_one_place():
    mesh = Mesh.of({}, places=[3])
    assert mesh.size == 1
    assert mesh.coordinates == {3: {}}
    assert mesh != Mesh.of({}, places=[0])
