# The way into Python for threads that may not have the GIL, while there is an interpreter to go to.

cdef extern from *:
    """
    #include <atomic>
    #include <pthread.h>
    #include <unistd.h>

    // The way into Python for a thread that may not have the GIL. Asking for the GIL of an ending interpreter ends the
    // thread, so the way is closed before that, and who is inside is waited for. False: leave Python alone.
    static std::atomic<int> lkv_inside{0};
    static std::atomic<bool> lkv_closed{false};
    static const int lkv_inside_child = pthread_atfork(nullptr, nullptr, [] { lkv_inside = 0; });

    static inline bool lkv_enter_python(void) {
      lkv_inside++;
    #if PY_VERSION_HEX >= 0x030d0000
      const bool lives = Py_IsInitialized() && !Py_IsFinalizing();
    #else
      const bool lives = Py_IsInitialized() && !_Py_IsFinalizing();
    #endif
      if (lives && (!lkv_closed || PyGILState_Check())) return true;
      lkv_inside--;
      return false;
    }

    static inline void lkv_leave_python(void) { lkv_inside--; }

    static void lkv_close_python(void) {
      (void)lkv_inside_child;
      lkv_closed = true;
      for (int i = 0; i < 1000 && lkv_inside > 0; i++) usleep(1000);
    }

    // The last reference to a wrapped object may go in any thread, also in one without the GIL.
    static void lkv_drop_owner(void *owner) {
      if (!lkv_enter_python()) return;
      const PyGILState_STATE state = PyGILState_Ensure();
      Py_DECREF((PyObject *)owner);
      PyGILState_Release(state);
      lkv_leave_python();
    }
    """
    void drop_owner "lkv_drop_owner"(void *owner) noexcept nogil
    bint enter_python "lkv_enter_python"() noexcept nogil
    void leave_python "lkv_leave_python"() noexcept nogil
    void close_python "lkv_close_python"() noexcept nogil
