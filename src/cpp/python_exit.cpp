// python_exit.cpp: takes the GIL where the interpreter may have ended. Compiled without exceptions.
//
// Until Python 3.13 a daemon thread that wants the GIL after the end is ended inside the call, by
// pthread_exit. Linux unwinds its stack then with libgcc, which does not get through frames that carry
// another unwinder (zig's are such), and would turn a noexcept one into an abort; a Mac drops the stack
// as it is. A cleanup handler of C runs before either: the thread stops here until the process is gone.
#include "python_exit.h"

#include <pthread.h>
#include <unistd.h>

namespace lily {

static void stop(void*) {
  for (;;) pause();
}

void restore_thread(PyThreadState* state) {
  pthread_cleanup_push(stop, nullptr);
  PyEval_RestoreThread(state);
  pthread_cleanup_pop(0);
}

PyGILState_STATE ensure_gil() {
  PyGILState_STATE state;
  pthread_cleanup_push(stop, nullptr);
  state = PyGILState_Ensure();
  pthread_cleanup_pop(0);
  return state;
}

}  // namespace lily
