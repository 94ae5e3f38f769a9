// python_exit.h: takes the GIL, or stops the thread for ever where the interpreter has ended.
#pragma once

#include <Python.h>

namespace lily {

void restore_thread(PyThreadState* state);
PyGILState_STATE ensure_gil();

}  // namespace lily
