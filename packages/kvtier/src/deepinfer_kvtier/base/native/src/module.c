/* The extension module: what Python sees of the compiled routines. */
#include "native.h"

#ifndef SOURCE_CHECKSUM
#error "compile with -DSOURCE_CHECKSUM=...: see native/build.py"
#endif

static PyObject *choose(PyObject *module, PyObject *name)
{
    (void)module;
    const char *text = PyUnicode_AsUTF8(name);
    if (!text)
        return NULL;
    return PyBool_FromLong(use_mixer(text));
}

#define FAST(name) (PyCFunction)(void (*)(void))name, METH_FASTCALL

static PyMethodDef methods[] = {
    {"chain_digests", FAST(chain_digests), "Digests of the blocks of a chain."},
    {"copy_rows", FAST(copy_rows), "Rows by number into rows, or back."},
    {"find_rows", FAST(find_rows), "Row numbers of keys in a table."},
    {"sum_records", FAST(sum_records), "xxh3_128 of each record; None for short ones."},
    {"read_records", FAST(read_records), "Read slots and judge each."},
    {"write_records", FAST(write_records), "Write slots one behind the other."},
    {"use_mixer", choose, METH_O, "For tests: the form of the sum; False where it cannot run."},
    {NULL, NULL, 0, NULL},
};

static int fill(PyObject *module)
{
    make_crc_table();
    choose_mixer();
    return PyModule_AddStringConstant(module, "SOURCE_CHECKSUM", SOURCE_CHECKSUM);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)fill},
    {0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "deepinfer_kvtier.base.native._routines",
    .m_doc = "Digests, copies, lookups, sums, reads and writes of records, compiled.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__routines(void)
{
    return PyModuleDef_Init(&definition);
}
