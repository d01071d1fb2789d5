"""Numbers of examples within a replica's part: they join in no way, but what is taken by them may."""

from __future__ import annotations

from dataclasses import replace

from autodist.graph.propagation.facts import Count, Dims, Fact, Form, Opaque, Positions, Rows, form_of, power
from autodist.graph.propagation.kinds import Elements
from autodist.graph.propagation.site import Rule, Site, tensor_name

_PASSING = ("Cast", "Identity", "StopGradient", "Squeeze", "Reshape")


def all_rows(site: Site) -> Positions | None:
    """What `range(shape(x)[0])` numbers: all rows of x."""
    if not site.is_zero(0) or site.scalar(2) != 1:
        return None
    limit = site.facts[1]
    if not isinstance(limit, Dims) or not limit.is_scalar:
        return None
    within = _counted_rows(site, site.inputs[1])
    if within is None or limit.forms[0] != Form(factors=power(within.count, 1)):
        return None
    return Positions(within, within.count)


def _counted_rows(site: Site, tensor: str) -> Rows | None:
    """The rows, as those of a first axis, of which a tensor is the number; None if it may be a multiple of it."""
    node = site.scope.producer(tensor)
    while node is not None and node.op in _PASSING:
        node = site.scope.producer(tensor_name(node.input[0]))
    if node is None or node.op != "StridedSlice":
        return None
    shape = site.scope.producer(tensor_name(node.input[0]))
    if shape is None or shape.op != "Shape":
        return None
    form = form_of(site.scope.fact(tensor_name(shape.input[0])))
    rows = form.rows if isinstance(form, Form) else None
    return None if rows is None or rows.per is None or rows.order else Rows(0, rows.count, rows.per)


def numbers_all(positions: Positions, form: Fact) -> bool:
    """Whether positions are those of all rows of a tensor whose rows lie along its first axis."""
    rows = form.rows if isinstance(form, Form) else None
    return rows is not None and positions.count == positions.within.count and rows == positions.within


def element_of_each(site: Site) -> Fact | None:
    """GatherNd of [number of the example, …]: of each example the element that the other columns name."""
    params, columns = site.form(0), _columns(site, site.inputs[1])
    if not columns or not isinstance(params, Form) or not isinstance(columns[0], Positions):
        return None
    if params.factors or site.rank(1) != 2 or site.number("batch_dims") or not numbers_all(columns[0], params):
        return None
    others = [form_of(fact) for fact in columns[1:]]
    for form in others:
        if not isinstance(form, Form) or form.factors or form.base != params.base:
            return None
    return params


def _columns(site: Site, tensor: str) -> list[Fact]:
    """What stands in the columns of a matrix that is put together from columns; empty where it is not."""
    node = site.scope.producer(tensor)
    if node is None:
        return []
    sources = [tensor_name(name) for name in node.input if not name.startswith("^")]
    if node.op == "Pack" and node.attr["axis"].i in (1, -1):
        return [site.scope.fact(name) for name in sources if site.scope.shape(name).rank == 1]
    axis = site.scope.constant(sources[-1]) if node.op == "ConcatV2" else None
    if axis is not None and int(axis) in (1, -1):
        return [site.scope.fact(name) for name in sources[:-1]]
    return []


def crop_of_each(site: Site) -> Fact:
    """CropAndResize: images, boxes, the number of each box's image."""
    images, boxes, numbers = site.form(0), site.form(1), site.facts[2]
    for form in (images, boxes):
        if isinstance(form, Opaque):
            return Opaque(form.reason)
    assert isinstance(boxes, Form)
    if isinstance(numbers, Positions) and numbers_all(numbers, images) and boxes.rows is not None:
        alike = (boxes.rows.axis, boxes.rows.count, boxes.rows.order) == (0, numbers.count, ())
        if alike and not boxes.factors and isinstance(images, Form) and not images.factors:
            return replace(images, mixed_at=images.mixed_at or boxes.mixed_at)
    return site.opaque("it crops images that it finds by their position in the part")


def divide(site: Site) -> Fact | list[Fact]:
    """DynamicPartition: the rows of each class, as a mask takes them."""
    data, classes, number = site.form(0), site.form(1), site.number("num_partitions")
    for form in (data, classes):
        if isinstance(form, Opaque):
            return Opaque(form.reason)
    assert isinstance(data, Form) and isinstance(classes, Form)
    fits = data.rows is not None and classes.rows is not None and data.base == classes.base
    if not fits or data.rows is None or data.rows.axis != 0 or site.rank(1) != 1 or classes.factors:
        return site.opaque("its rows and their classes do not both have the examples along the first axis")
    if data.rows.order:
        return site.opaque("its rows are not in the order of the examples")
    parts = [Rows(0, Count(Elements(site.named(k))), None) for k in range(number)]
    return [Form(part, data.factors, data.mixed_at or classes.mixed_at) for part in parts]


RULES: dict[str, Rule] = {"CropAndResize": crop_of_each, "DynamicPartition": divide}
