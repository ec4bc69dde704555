/* Records: summed, read and checked, written. Memory is the caller's; the interpreter runs on. */
#include "native.h"

#include <errno.h>
#include <limits.h>
#include <string.h>
#include <unistd.h>

#ifndef IOV_MAX
#define IOV_MAX 1024
#endif
#define GROUP_BYTES (256 << 10) /* stays in the second-level cache until it is summed */

/* One record's bytes in memory: `count` of the vectors, from `first` on. */
typedef struct {
    size_t first, length;
    int count;
} place;

/* Views of all records of a call, held until `let_go`. */
typedef struct {
    Py_buffer *held;
    struct iovec *vectors;
    place *places;
    size_t views, records;
} memory;

static void let_go(memory *all)
{
    for (size_t i = 0; i < all->views; i++)
        PyBuffer_Release(&all->held[i]);
    PyMem_Free(all->held);
    PyMem_Free(all->vectors);
    PyMem_Free(all->places);
}

static int out_of_memory(void)
{
    PyErr_NoMemory();
    return -1;
}

/* lists: a list of sequences of buffers, one a record. spare: more vectors for each record. */
static int hold(memory *all, PyObject *lists, int spare)
{
    memset(all, 0, sizeof *all);
    if (!PyList_Check(lists)) {
        PyErr_SetString(PyExc_TypeError, "views of records must be a list of lists");
        return -1;
    }
    size_t records = (size_t)PyList_GET_SIZE(lists), views = 0;
    for (size_t i = 0; i < records; i++) {
        Py_ssize_t some = PySequence_Size(PyList_GET_ITEM(lists, i));
        if (some < 0)
            return -1;
        views += (size_t)some;
    }
    all->held = PyMem_Calloc(views + 1, sizeof *all->held);
    all->places = PyMem_Calloc(records + 1, sizeof *all->places);
    all->vectors = PyMem_Calloc(views + records * (size_t)spare + 1, sizeof *all->vectors);
    if (!all->held || !all->places || !all->vectors) {
        let_go(all);
        return out_of_memory();
    }
    size_t at = 0;
    for (size_t i = 0; i < records; i++) {
        place *one = &all->places[i];
        one->first = at;
        PyObject *list = PySequence_Fast(PyList_GET_ITEM(lists, i), "views must be a sequence");
        if (!list) {
            let_go(all);
            return -1;
        }
        Py_ssize_t some = PySequence_Fast_GET_SIZE(list);
        for (Py_ssize_t j = 0; j < some && all->views < views; j++) {
            Py_buffer *view = &all->held[all->views];
            if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(list, j), view, PyBUF_SIMPLE) < 0) {
                Py_DECREF(list);
                let_go(all);
                return -1;
            }
            all->views++;
            if (view->len) {
                all->vectors[at++] = (struct iovec){view->buf, (size_t)view->len};
                one->length += (size_t)view->len;
            }
        }
        Py_DECREF(list);
        one->count = (int)(at - one->first);
        at += (size_t)spare;
        all->records++;
    }
    return 0;
}

/* sum_records(lists, held) -> list of 16-byte sums; None where a record is too short for this form.

   Up to `held` bytes the interpreter waits: who gives it up for less than a millisecond may have to
   wait several for its return. */
PyObject *sum_records(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    memory all;
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "sum_records: see native/_routines.pyi");
        return NULL;
    }
    size_t held = PyLong_AsSize_t(args[1]), bytes = 0;
    if (held == (size_t)-1 && PyErr_Occurred())
        return NULL;
    if (hold(&all, args[0], 0) < 0)
        return NULL;
    uint8_t(*sums)[SUM_BYTES] = PyMem_Malloc((all.records + 1) * SUM_BYTES);
    PyObject *found = PyList_New((Py_ssize_t)all.records);
    if (sums && found) {
        for (size_t i = 0; i < all.records; i++)
            bytes += all.places[i].length;
        PyThreadState *given_up = bytes > held ? PyEval_SaveThread() : NULL;
        for (size_t i = 0; i < all.records; i++) {
            place *one = &all.places[i];
            if (one->length >= LEAST_BYTES)
                checksum(sums[i], all.vectors + one->first, one->count, one->length);
        }
        if (given_up)
            PyEval_RestoreThread(given_up);
        for (size_t i = 0; i < all.records; i++) {
            PyObject *sum = Py_None;
            if (all.places[i].length >= LEAST_BYTES)
                sum = PyBytes_FromStringAndSize((char *)sums[i], SUM_BYTES);
            else
                Py_INCREF(sum);
            if (!sum) {
                Py_CLEAR(found);
                break;
            }
            PyList_SET_ITEM(found, (Py_ssize_t)i, sum);
        }
    } else {
        Py_CLEAR(found);
        out_of_memory();
    }
    PyMem_Free(sums);
    let_go(&all);
    return found;
}

/* preadv or pwritev until `total` bytes are done or the file ends; -1 with errno. Changes vectors. */
static ssize_t transfer(int fd, struct iovec *vectors, size_t count, off_t offset, size_t total,
                        int writing)
{
    size_t done = 0;
    while (done < total) {
        int some = count > IOV_MAX ? IOV_MAX : (int)count;
        ssize_t moved = writing ? pwritev(fd, vectors, some, offset + (off_t)done)
                                : preadv(fd, vectors, some, offset + (off_t)done);
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved == 0 && writing)
            errno = EIO;
        if (moved < 0 || (moved == 0 && writing))
            return -1;
        if (moved == 0)
            break;
        done += (size_t)moved;
        while (count && (size_t)moved >= vectors->iov_len) {
            moved -= (ssize_t)vectors->iov_len;
            vectors++, count--;
        }
        if (moved) {
            vectors->iov_base = (char *)vectors->iov_base + moved;
            vectors->iov_len -= (size_t)moved;
        }
    }
    return (ssize_t)done;
}

/* Where the fields of a trailer lie: FORMAT.md. */
enum {
    AT_FORMAT = 8, AT_KIND = 10, AT_FLAGS = 12, AT_LENGTH = 16, AT_DEPTH = 20, AT_DIGEST = 24,
    AT_PARENT = 56, AT_CHECKSUM = 96, AT_EXTRA = 112, AT_GENERATION = 176, AT_SHARD = 177,
    AT_CRC = 188,
    PARENT_BYTES = 16, EXTRA_BYTES = 64,
};

static uint32_t u32_at(const uint8_t *at)
{
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

typedef struct {
    long kind, shard;
    size_t size, slot;
} expectation;

/* 'o' right; 'c' damaged; 'm' whole, but another record; as `reading._verify` decides. */
static char judged(const uint8_t *trailer, const uint8_t *sum, const char *digest,
                   const expectation *want)
{
    int whole = u32_at(trailer + AT_CRC) == crc_of(trailer, AT_CRC) &&
                !memcmp(trailer, "KVTSLOT1", 8) && trailer[AT_FORMAT] == 1 &&
                !trailer[AT_FORMAT + 1];
    int meant = trailer[AT_KIND] == want->kind && trailer[AT_SHARD] == want->shard &&
                u32_at(trailer + AT_LENGTH) == want->size &&
                !memcmp(trailer + AT_DIGEST, digest, DIGEST_BYTES);
    int right = whole && !memcmp(trailer + AT_CHECKSUM, sum, SUM_BYTES);
    if (!(whole && (right || !meant)))
        return 'c';
    return meant ? 'o' : 'm';
}

static int give(PyObject *want, const char *name, PyObject *value)
{
    int failed = value ? PyObject_SetAttrString(want, name, value) : -1;
    Py_XDECREF(value);
    return failed;
}

static PyObject *some_bytes(const uint8_t *at, Py_ssize_t count)
{
    return PyBytes_FromStringAndSize((const char *)at, count);
}

/* What the trailer says into the attributes of a `Wanted`. */
static int tell(PyObject *want, const uint8_t *trailer, const uint8_t *sum, uint32_t sealed_flag)
{
    if (give(want, "checksum", some_bytes(sum, SUM_BYTES)) < 0 ||
        give(want, "parent", some_bytes(trailer + AT_PARENT, PARENT_BYTES)) < 0 ||
        give(want, "depth", PyLong_FromUnsignedLong(u32_at(trailer + AT_DEPTH))) < 0)
        return -1;
    uint32_t flags = u32_at(trailer + AT_FLAGS);
    if (!flags && !trailer[AT_GENERATION])
        return 0;
    if (give(want, "approximate", PyBool_FromLong(flags & 1)) < 0 ||
        give(want, "generation", PyLong_FromLong(trailer[AT_GENERATION])) < 0)
        return -1;
    return flags & sealed_flag ? give(want, "seal", some_bytes(trailer + AT_EXTRA, EXTRA_BYTES)) : 0;
}

/* Sums and judges slots that are in memory. */
static void judge(const memory *all, size_t from, size_t to, const uint8_t *tails,
                  const char *const *digests, const expectation *want, uint8_t (*sums)[SUM_BYTES],
                  char *codes)
{
    size_t tail = want->slot - want->size, pad = ((want->size + 7) & ~(size_t)7) - want->size;
    for (size_t i = from; i < to; i++) {
        place *one = &all->places[i];
        checksum(sums[i], all->vectors + one->first, one->count, one->length);
        codes[i] = judged(tails + tail * i + pad, sums[i], digests[i], want);
    }
}

/* Reads the slots group by group and judges each as it comes; an errno, or 0. */
static int read_and_judge(int fd, off_t offset, const memory *all, uint8_t *tails,
                          const char *const *digests, const expectation *want,
                          uint8_t (*sums)[SUM_BYTES], char *codes, struct iovec *scratch)
{
    size_t tail = want->slot - want->size;
    for (size_t from = 0; from < all->records;) {
        size_t to = from, used = 0;
        while (to < all->records &&
               (to == from || ((to - from + 1) * want->slot <= GROUP_BYTES &&
                               used + (size_t)all->places[to].count < IOV_MAX))) {
            place *one = &all->places[to];
            memcpy(scratch + used, all->vectors + one->first, (size_t)one->count * sizeof *scratch);
            used += (size_t)one->count;
            scratch[used++] = (struct iovec){tails + tail * to, tail};
            to++;
        }
        size_t bytes = (to - from) * want->slot;
        ssize_t got = transfer(fd, scratch, used, offset + (off_t)(from * want->slot), bytes, 0);
        if (got < 0)
            return errno;
        /* Behind a short read the memory holds what it held before. */
        judge(all, from, from + (size_t)got / want->slot, tails, digests, want, sums, codes);
        if ((size_t)got < bytes)
            break;
        from = to;
    }
    return 0;
}

/* read_records(fd, offset, wanted, tails, size, slot, kind, shard, sealed_flag, got) -> codes

   One character a record: 'o', 'c', 'm', or 's' for one that is not there. With fd -1 nothing is
   read: `got` bytes of the slots are in memory already. raises: OSError. */
PyObject *read_records(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 10 || !PyList_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "read_records: see native/_routines.pyi");
        return NULL;
    }
    long fd = PyLong_AsLong(args[0]);
    long long offset = PyLong_AsLongLong(args[1]), got = PyLong_AsLongLong(args[9]);
    expectation want = {PyLong_AsLong(args[6]), PyLong_AsLong(args[7]), PyLong_AsSize_t(args[4]),
                        PyLong_AsSize_t(args[5])};
    unsigned long sealed_flag = PyLong_AsUnsignedLong(args[8]);
    if (PyErr_Occurred())
        return NULL;
    PyObject *wanted = args[2], *lists = NULL, *answer = NULL;
    size_t count = (size_t)PyList_GET_SIZE(wanted);
    memory all = {0};
    Py_buffer tails = {0};
    const char **digests = PyMem_Calloc(count + 1, sizeof *digests);
    PyObject **owners = PyMem_Calloc(count + 1, sizeof *owners);
    uint8_t(*sums)[SUM_BYTES] = PyMem_Malloc((count + 1) * SUM_BYTES);
    char *codes = PyMem_Malloc(count + 1);
    struct iovec *scratch = NULL;
    if (!digests || !owners || !sums || !codes) {
        out_of_memory();
        goto end;
    }
    memset(codes, 's', count + 1);
    if (!(lists = PyList_New((Py_ssize_t)count)))
        goto end;
    for (size_t i = 0; i < count; i++) {
        PyObject *one = PyList_GET_ITEM(wanted, i);
        PyObject *views = PyObject_GetAttrString(one, "views");
        if (!views)
            goto end;
        PyList_SET_ITEM(lists, (Py_ssize_t)i, views);
        owners[i] = PyObject_GetAttrString(one, "digest");
        if (!owners[i])
            goto end;
        if (!PyBytes_Check(owners[i]) || PyBytes_GET_SIZE(owners[i]) != DIGEST_BYTES) {
            PyErr_SetString(PyExc_ValueError, "a digest has 32 bytes");
            goto end;
        }
        digests[i] = PyBytes_AS_STRING(owners[i]);
    }
    if (hold(&all, lists, 0) < 0) {
        memset(&all, 0, sizeof all);
        goto end;
    }
    if (PyObject_GetBuffer(args[3], &tails, PyBUF_WRITABLE) < 0)
        goto end;
    size_t page_end = (((want.size + 7) & ~(size_t)7) + TRAILER_BYTES + PAGE - 1) & ~(size_t)(PAGE - 1);
    int fits = want.size >= LEAST_BYTES && want.slot == page_end &&
               (size_t)tails.len >= count * (want.slot - want.size);
    for (size_t i = 0; i < count; i++)
        fits = fits && all.places[i].length == want.size && all.places[i].count < IOV_MAX;
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "records, slots and tails do not fit each other");
        goto end;
    }
    size_t most = all.views + count + 1;
    if (!(scratch = PyMem_Malloc(most * sizeof *scratch))) {
        out_of_memory();
        goto end;
    }
    int failure = 0;
    Py_BEGIN_ALLOW_THREADS
    if (fd >= 0) {
        failure = read_and_judge((int)fd, (off_t)offset, &all, tails.buf, digests, &want, sums,
                                 codes, scratch);
    } else {
        size_t there = got > 0 ? (size_t)got / want.slot : 0;
        judge(&all, 0, there < count ? there : count, tails.buf, digests, &want, sums, codes);
    }
    Py_END_ALLOW_THREADS
    if (failure) {
        errno = failure;
        PyErr_SetFromErrno(PyExc_OSError);
        goto end;
    }
    size_t tail = want.slot - want.size, pad = ((want.size + 7) & ~(size_t)7) - want.size;
    for (size_t i = 0; i < count; i++)
        if (codes[i] != 's' &&
            tell(PyList_GET_ITEM(wanted, i), (uint8_t *)tails.buf + tail * i + pad, sums[i],
                 (uint32_t)sealed_flag) < 0)
            goto end;
    answer = PyUnicode_FromStringAndSize(codes, (Py_ssize_t)count);
end:
    if (tails.obj)
        PyBuffer_Release(&tails);
    if (all.held)
        let_go(&all);
    Py_XDECREF(lists);
    for (size_t i = 0; owners && i < count; i++)
        Py_XDECREF(owners[i]);
    PyMem_Free(digests);
    PyMem_Free(owners);
    PyMem_Free(sums);
    PyMem_Free(codes);
    PyMem_Free(scratch);
    return answer;
}

/* write_records(fd, offset, lists, trailers) writes slots one behind the other. raises: OSError. */
PyObject *write_records(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    static uint8_t zeros[PAGE];
    if (nargs != 4) {
        PyErr_SetString(PyExc_TypeError, "write_records: see native/_routines.pyi");
        return NULL;
    }
    long fd = PyLong_AsLong(args[0]);
    long long offset = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    memory all;
    Py_buffer trailers;
    if (hold(&all, args[2], 3) < 0)
        return NULL;
    if (PyObject_GetBuffer(args[3], &trailers, PyBUF_SIMPLE) < 0) {
        let_go(&all);
        return NULL;
    }
    int failure = 0;
    if ((size_t)trailers.len != all.records * TRAILER_BYTES) {
        PyErr_SetString(PyExc_ValueError, "one trailer a record is needed");
        failure = -1;
    } else {
        Py_BEGIN_ALLOW_THREADS
        size_t used = 0, total = 0;
        for (size_t i = 0; i < all.records; i++) {
            place *one = &all.places[i];
            size_t pad = ((one->length + 7) & ~(size_t)7) - one->length;
            size_t end = one->length + pad + TRAILER_BYTES;
            size_t slot = (end + PAGE - 1) & ~(size_t)(PAGE - 1);
            memmove(all.vectors + used, all.vectors + one->first,
                    (size_t)one->count * sizeof *all.vectors);
            used += (size_t)one->count;
            if (pad)
                all.vectors[used++] = (struct iovec){zeros, pad};
            all.vectors[used++] =
                (struct iovec){(uint8_t *)trailers.buf + i * TRAILER_BYTES, TRAILER_BYTES};
            if (slot > end)
                all.vectors[used++] = (struct iovec){zeros, slot - end};
            total += slot;
        }
        if (transfer((int)fd, all.vectors, used, (off_t)offset, total, 1) < 0)
            failure = errno;
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&trailers);
    let_go(&all);
    if (failure > 0) {
        errno = failure;
        PyErr_SetFromErrno(PyExc_OSError);
    }
    if (failure)
        return NULL;
    Py_RETURN_NONE;
}
