/* What the sources of the extension module share. */
#ifndef KVTIER_NATIVE_H
#define KVTIER_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <sys/uio.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "numbers in files are little endian: this machine takes the pure form"
#endif

#define SUM_BYTES 16
#define LEAST_BYTES 241 /* shorter payloads have another sum, which the library takes */
#define PAGE 4096
#define TRAILER_BYTES 192
#define DIGEST_BYTES 32

/* checksum.c */
void choose_mixer(void);
int use_mixer(const char *name);
void checksum(uint8_t *out, const struct iovec *pieces, int count, size_t length);

/* crc.c: as zlib's crc32 */
void make_crc_table(void);
uint32_t crc_of(const uint8_t *data, size_t length);

/* chain.c */
void choose_compressor(const char *name);
PyObject *chain_digests(PyObject *module, PyObject *const *args, Py_ssize_t nargs);

/* copies.c */
PyObject *copy_rows(PyObject *module, PyObject *const *args, Py_ssize_t nargs);

/* records.c */
PyObject *sum_records(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *read_records(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *write_records(PyObject *module, PyObject *const *args, Py_ssize_t nargs);

/* table.c */
PyObject *find_rows(PyObject *module, PyObject *const *args, Py_ssize_t nargs);

#endif
