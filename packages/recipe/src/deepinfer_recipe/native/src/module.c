/* The extension module: what Python sees of the compiled routines. */
#include "native.h"

#ifndef SOURCE_CHECKSUM
#error "compile with -DSOURCE_CHECKSUM=...: see native/build.py"
#endif

PyObject *refuse(const char *why)
{
    PyErr_SetString(PyExc_ValueError, why);
    return NULL;
}

static PyMethodDef methods[] = {
    {"loads", json_loads, METH_O, "Read JSON from bytes or str."},
    {"copy", json_copy, METH_O, "Copy decoded JSON, checked as its text would be."},
    {"quote", json_quote, METH_O, "A str as a JSON string."},
    {"between", (PyCFunction)(void (*)(void))json_between, METH_FASTCALL,
     "head + quote(text) + tail."},
    {"prompt_json", json_prompt, METH_O, "Write JSON with ', ' and ': '."},
    {"compact_json", json_compact, METH_O, "Write JSON without spaces."},
    {"find_list", (PyCFunction)(void (*)(void))json_find_list, METH_FASTCALL,
     "Where in a JSON object's bytes the list under a key lies, or None."},
    {"is_plain", (PyCFunction)(void (*)(void))text_is_plain, METH_FASTCALL,
     "Whether a text has nothing to do with any of the patterns."},
    {"join", (PyCFunction)(void (*)(void))text_join, METH_FASTCALL,
     "Join pieces; tell where those of a type and given spans of them lie."},
    {NULL, NULL, 0, NULL},
};

static int fill(PyObject *module)
{
    if (add_event_type(module) < 0)
        return -1;
    return PyModule_AddStringConstant(module, "SOURCE_CHECKSUM", SOURCE_CHECKSUM);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)fill},
    {0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "deepinfer_recipe.native._routines",
    .m_doc = "What the codec does most, compiled.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__routines(void)
{
    return PyModuleDef_Init(&definition);
}
