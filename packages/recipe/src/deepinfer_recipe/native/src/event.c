/* What an event of a streamed answer consists of: the base of `stream_event.StreamEvent`.
 *
 * One is made for nearly every token. `of` makes one without the detour through `__init__`.
 */
#include "native.h"

#include <stddef.h>
#include <structmember.h>

enum { KIND, HEAD, TEXT, TAIL, DATA, FIELDS };

typedef struct {
    PyObject_HEAD
    PyObject *fields[FIELDS];
} Event;

#define FIELD(name, index)                                                                     \
    {name, T_OBJECT_EX, offsetof(Event, fields) + (index) * sizeof(PyObject *), 0, NULL}

static PyMemberDef event_members[] = {
    FIELD("kind", KIND), FIELD("_head", HEAD), FIELD("text", TEXT),
    FIELD("_tail", TAIL), FIELD("data", DATA), {NULL, 0, 0, 0, NULL},
};

static int event_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    for (int i = 0; i < FIELDS; i++)
        Py_VISIT(((Event *)self)->fields[i]);
    return 0;
}

static int event_clear(PyObject *self)
{
    for (int i = 0; i < FIELDS; i++)
        Py_CLEAR(((Event *)self)->fields[i]);
    return 0;
}

static void event_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    (void)event_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *event_of(PyObject *type, PyObject *const *args, Py_ssize_t count)
{
    if (count != FIELDS) {
        PyErr_SetString(PyExc_TypeError, "of() takes kind, head, text, tail, data");
        return NULL;
    }
    PyObject *self = ((PyTypeObject *)type)->tp_alloc((PyTypeObject *)type, 0);
    if (self != NULL)
        for (int i = 0; i < FIELDS; i++)
            ((Event *)self)->fields[i] = Py_NewRef(args[i]);
    return self;
}

static PyObject *event_to_json(PyObject *self, PyObject *unused)
{
    (void)unused;
    PyObject *const *fields = ((Event *)self)->fields;
    if (fields[HEAD] == NULL || fields[TEXT] == NULL || fields[TAIL] == NULL) {
        PyErr_SetString(PyExc_AttributeError, "the event was not initialised");
        return NULL;
    }
    if (fields[TEXT] == Py_None)
        return Py_NewRef(fields[HEAD]);
    return json_between(NULL, &fields[HEAD], 3); /* head, text and tail stand side by side */
}

static PyMethodDef event_methods[] = {
    {"of", (PyCFunction)(void (*)(void))event_of, METH_FASTCALL | METH_CLASS,
     "An event with these five fields: kind, head, text, tail, data."},
    {"to_json", event_to_json, METH_NOARGS,
     "to_json($self, /)\n--\n\nThe event as compact JSON text."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot event_slots[] = {
    {Py_tp_members, event_members}, {Py_tp_methods, event_methods},
    {Py_tp_traverse, (void *)event_traverse}, {Py_tp_clear, (void *)event_clear},
    {Py_tp_dealloc, (void *)event_dealloc}, {0, NULL},
};

static PyType_Spec event_spec = {
    .name = "deepinfer_recipe.native._routines.Event",
    .basicsize = sizeof(Event),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = event_slots,
};

int add_event_type(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &event_spec, NULL);
    int result = type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);
    Py_XDECREF(type);
    return result;
}
