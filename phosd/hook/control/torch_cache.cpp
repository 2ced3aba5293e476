#include "control/torch_cache.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdio>
#include <mutex>

#include "base/process.h"
#include "memory/contexts.h"

namespace phos::torch_cache {
namespace {

using wire::Release;

using Object = void;

// The functions of CPython used here: all in its stable ABI since 3.2.
struct Python {
    int (*Py_IsInitialized)();
    int (*Py_AddPendingCall)(int (*)(void*), void*);
    Object* (*PyImport_GetModuleDict)();                    // borrowed
    Object* (*PyDict_GetItemString)(Object*, const char*);  // borrowed; raises nothing
    Object* (*PyObject_GetAttrString)(Object*, const char*);
    Object* (*PyObject_CallObject)(Object*, Object*);
    Object* (*PyObject_Repr)(Object*);
    Object* (*PyUnicode_AsUTF8String)(Object*);
    char* (*PyBytes_AsString)(Object*);
    void (*PyErr_Fetch)(Object**, Object**, Object**);
    void (*PyErr_NormalizeException)(Object**, Object**, Object**);
    void (*PyErr_Restore)(Object*, Object*, Object*);
    void (*PyErr_Clear)();
    int (*PyErr_GivenExceptionMatches)(Object*, Object*);
    void (*Py_DecRef)(Object*);
    Object** PyExc_Exception;
};

Python python;  // constant once found
bool found = false;

std::mutex mutex;  // held briefly, never during a call into the program
wire::ReleaseState now{};

wire::ReleaseState made(Release release, const char* reason = "") {
    wire::ReleaseState state{};
    state.release = static_cast<uint32_t>(release);
    std::snprintf(state.reason, sizeof state.reason, "%s", reason);
    return state;
}

// An exception taken from the interpreter, and owned.
struct Raised {
    Object* type = nullptr;
    Object* value = nullptr;
    Object* trace = nullptr;

    Raised() { python.PyErr_Fetch(&type, &value, &trace); }
    ~Raised() {
        for (Object* part : {type, value, trace}) python.Py_DecRef(part);
    }
    Raised(const Raised&) = delete;
    Raised& operator=(const Raised&) = delete;

    void put_back() {
        python.PyErr_Restore(type, value, trace);
        type = value = trace = nullptr;
    }
};

wire::ReleaseState failure(Raised& raised) {
    python.PyErr_NormalizeException(&raised.type, &raised.value, &raised.trace);
    Object* const shown = python.PyObject_Repr(raised.value);
    Object* const bytes = shown ? python.PyUnicode_AsUTF8String(shown) : nullptr;
    const char* const text = bytes ? python.PyBytes_AsString(bytes) : nullptr;
    char reason[sizeof now.reason];
    std::snprintf(reason, sizeof reason, "torch.cuda.empty_cache() raised %s",
                  text ? text : "an exception");
    python.Py_DecRef(bytes);
    python.Py_DecRef(shown);
    python.PyErr_Clear();  // errors while converting it to text
    return made(Release::failed, reason);
}

// Returns the result for the interpreter: 0, or -1 with the program's exception. All of this
// is Python code, in which the program's signal handlers may run.
int empty_cache(Object* cuda, wire::ReleaseState* state) {
    Object* const function = python.PyObject_GetAttrString(cuda, "empty_cache");
    Object* const returned = function ? python.PyObject_CallObject(function, nullptr) : nullptr;
    python.Py_DecRef(function);
    if (returned) {
        python.Py_DecRef(returned);
        *state = made(Release::released);
        return 0;
    }
    Raised raised;
    // A Ctrl-C that came meanwhile, or an exit() in a signal handler.
    const bool programs = raised.type && python.PyErr_GivenExceptionMatches(
                                             raised.type, *python.PyExc_Exception) == 0;
    if (programs) {
        *state = made(Release::failed, "a signal interrupted torch.cuda.empty_cache()");
        raised.put_back();
        return -1;
    }
    *state = failure(raised);
    return 0;
}

// Called by CPython in the main thread, between two bytecodes, with the GIL.
int run(void*) {
    // A forked child inherits pending calls, but the hook is disabled in it.
    if (!active()) return 0;
    const KeepErrno keep;
    wire::ReleaseState state{};
    int result = 0;
    Raised before;
    if (contexts::captures()) {
        state = made(Release::capturing);
    } else if (Object* const cuda =
                   python.PyDict_GetItemString(python.PyImport_GetModuleDict(), "torch.cuda")) {
        result = empty_cache(cuda, &state);
    } else {
        state = made(Release::no_torch);
    }
    if (result == 0) before.put_back();
    const std::lock_guard lock(mutex);
    now = state;
    return result;
}

bool complete() {
    const struct {
        const char* name;
        void* at;
    } wanted[] = {
#define PHOS_PYTHON(name) {#name, &python.name}
        PHOS_PYTHON(Py_IsInitialized),
        PHOS_PYTHON(Py_AddPendingCall),
        PHOS_PYTHON(PyImport_GetModuleDict),
        PHOS_PYTHON(PyDict_GetItemString),
        PHOS_PYTHON(PyObject_GetAttrString),
        PHOS_PYTHON(PyObject_CallObject),
        PHOS_PYTHON(PyObject_Repr),
        PHOS_PYTHON(PyUnicode_AsUTF8String),
        PHOS_PYTHON(PyBytes_AsString),
        PHOS_PYTHON(PyErr_Fetch),
        PHOS_PYTHON(PyErr_NormalizeException),
        PHOS_PYTHON(PyErr_Restore),
        PHOS_PYTHON(PyErr_Clear),
        PHOS_PYTHON(PyErr_GivenExceptionMatches),
        PHOS_PYTHON(Py_DecRef),
        PHOS_PYTHON(PyExc_Exception),
#undef PHOS_PYTHON
    };
    for (const auto& [name, at] : wanted) {
        void* const address = dlsym(RTLD_DEFAULT, name);
        if (!address) return false;
        *static_cast<void**>(at) = address;
    }
    return true;
}

}  // namespace

void find_interpreter() {
    found = complete();
    if (!found) {
        dlerror();  // clears the error of a missing function
        return;
    }
    Dl_info info;
    link_map* library = nullptr;
    if (dladdr1(reinterpret_cast<void*>(python.Py_IsInitialized), &info,
                reinterpret_cast<void**>(&library), RTLD_DL_LINKMAP))
        dlopen(library->l_name, RTLD_LAZY | RTLD_NOLOAD);  // keeps it loaded, for it may be called
}

wire::ReleaseState release() {
    const std::lock_guard lock(mutex);
    if (!found || !python.Py_IsInitialized()) return now = made(Release::no_interpreter);
    if (now.release == static_cast<uint32_t>(Release::asked)) return now;
    // Any thread may add a pending call, without the GIL. Before Python 3.12, if there are several
    // interpreters, one that is not the main one may run it, and uses its own imports.
    return now = python.Py_AddPendingCall(run, nullptr) == 0
                     ? made(Release::asked)
                     : made(Release::failed, "the interpreter has too many calls pending");
}

wire::ReleaseState state() {
    const std::lock_guard lock(mutex);
    return now;
}

}  // namespace phos::torch_cache
