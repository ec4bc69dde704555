/* Characters of 1, 2 or 4 bytes: Python keeps the text of a str at the width of its widest. */
#ifndef DEEPINFER_RECIPE_WIDTHS_H
#define DEEPINFER_RECIPE_WIDTHS_H

#include "native.h"

#include <string.h>

/* copy_IN_OUT(out, text, length) returns how many characters were written. */
#define DEFINE_COPY(IN, OUT)                                                                   \
    static inline Py_ssize_t copy_##IN##_##OUT(OUT *out, const IN *text, Py_ssize_t length)    \
    {                                                                                          \
        if (sizeof(IN) != sizeof(OUT))                                                         \
            for (Py_ssize_t i = 0; i < length; i++)                                            \
                out[i] = text[i];                                                              \
        else if (length > 0)                                                                   \
            memcpy(out, text, (size_t)length * sizeof(IN));                                    \
        return length;                                                                         \
    }

DEFINE_COPY(Py_UCS1, Py_UCS1)
DEFINE_COPY(Py_UCS1, Py_UCS2)
DEFINE_COPY(Py_UCS1, Py_UCS4)
DEFINE_COPY(Py_UCS2, Py_UCS2)
DEFINE_COPY(Py_UCS2, Py_UCS4)
DEFINE_COPY(Py_UCS4, Py_UCS4)

/* Call FUNCTION of the widths of a string and of what is written, which is not narrower. */
#define BY_WIDTHS(FUNCTION, in_width, out_width, out, text, length)                            \
    ((in_width) == 1 && (out_width) == 1                                                       \
         ? FUNCTION##_Py_UCS1_Py_UCS1((Py_UCS1 *)(out), (const Py_UCS1 *)(text), (length))     \
     : (in_width) == 1 && (out_width) == 2                                                     \
         ? FUNCTION##_Py_UCS1_Py_UCS2((Py_UCS2 *)(out), (const Py_UCS1 *)(text), (length))     \
     : (in_width) == 1                                                                         \
         ? FUNCTION##_Py_UCS1_Py_UCS4((Py_UCS4 *)(out), (const Py_UCS1 *)(text), (length))     \
     : (in_width) == 2 && (out_width) == 2                                                     \
         ? FUNCTION##_Py_UCS2_Py_UCS2((Py_UCS2 *)(out), (const Py_UCS2 *)(text), (length))     \
     : (in_width) == 2                                                                         \
         ? FUNCTION##_Py_UCS2_Py_UCS4((Py_UCS4 *)(out), (const Py_UCS2 *)(text), (length))     \
         : FUNCTION##_Py_UCS4_Py_UCS4((Py_UCS4 *)(out), (const Py_UCS4 *)(text), (length)))

#endif
