/* A program's own say in its checkpoints: C and C++. Nothing needs to be linked: the functions are
 * found at run time, in the hook that `phos run` loads. Without it, and before the first CUDA call
 * of the process, every call here does nothing and returns PHOS_NOTHING.
 *
 *     for (long step = 0; step < steps; ++step) {
 *         train(step);
 *         if (phos_wanted()) {
 *             flush(log);
 *             if (phos_safe_point() == PHOS_RESTORED) reconnect();
 *         }
 *     }
 *
 * docs/operate/programs.md explains safe points; phosd.program is the same for Python.
 */
#ifndef PHOS_H
#define PHOS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* RTLD_DEFAULT; too late if dlfcn.h was included before: see below */
#endif
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What becomes of the program when its image is complete. */
enum phos_then {
    PHOS_RUN = 0,  /* it goes on */
    PHOS_END = 1,  /* it is ended */
    PHOS_HOLD = 2, /* it stands still until `phos continue` */
};

enum phos_outcome {
    PHOS_FAILED = -1,  /* no image was made; phos_why() tells why, and the program goes on */
    PHOS_NOTHING = 0,  /* nothing happened: nobody asked, or phosd or its hook is not there */
    PHOS_SAVED = 1,    /* the image is complete */
    PHOS_RESTORED = 2, /* this is the restored program */
    PHOS_STOPPED = 3,  /* it was stopped here by a checkpoint, migration or suspension from outside,
                          and goes on */
    PHOS_WAITING = 4,  /* not over yet; phos_program_wait() alone returns it */
};

/* What the hook exports. A ticket is a thread's place in a wait; 0 is none. */
enum phos_program_kind {
    PHOS_AT_SAFE_POINT = 0,
    PHOS_ASKS = 1,  /* joins threads that ask for the same already */
    PHOS_JOINS = 2, /* only joins them: 0 if there are none */
};
typedef int phos_program_wanted_t(void);
typedef void phos_program_declare_t(int has_safe_points);
typedef void phos_program_refuse_t(const char* why);
typedef uint64_t phos_program_begin_t(int kind, int then);
typedef uint64_t phos_program_begin_named_t(int kind, int then, const char* name);
typedef int phos_program_wait_t(uint64_t ticket, int milliseconds, char* why, size_t size);
typedef void phos_program_leave_t(uint64_t ticket);

#define PHOS_WHY_BYTES 256
#define PHOS_NAME_BYTES 64 /* with the zero at its end */

static inline char* phos_why_buffer(void) {
    static __thread char why[PHOS_WHY_BYTES];
    return why;
}

/* Why the thread's last call returned PHOS_FAILED: an error's name, a colon and its message. */
static inline const char* phos_why(void) {
    return phos_why_buffer();
}

static inline void* phos_function(const char* name) {
#ifdef RTLD_DEFAULT
    return dlsym(RTLD_DEFAULT, name);
#else
    return dlsym(NULL, name); /* its value in glibc */
#endif
}

static inline int phos_wait_as(int kind, int then, const char* name) {
    phos_program_begin_t* begin;
    phos_program_begin_named_t* begin_named;
    phos_program_wait_t* wait;
    phos_program_leave_t* leave;
    uint64_t ticket;
    int outcome = PHOS_WAITING;
    phos_why_buffer()[0] = 0;
    /* ISO C knows no conversion from an object pointer to a function pointer; POSIX does. */
    *(void**)&begin = phos_function("phos_program_begin");
    *(void**)&begin_named = phos_function("phos_program_begin_named");
    *(void**)&wait = phos_function("phos_program_wait");
    *(void**)&leave = phos_function("phos_program_leave");
    if (!begin || !wait || !leave) return PHOS_NOTHING;
    if (name && !begin_named) {
        snprintf(
            phos_why_buffer(), PHOS_WHY_BYTES, "%s",
            "Unsupported: this program was started by a phosd without names of images; start it "
            "anew, or give no name");
        return PHOS_FAILED;
    }
    ticket = name ? begin_named(kind, then, name) : begin(kind, then);
    if (!ticket) return PHOS_NOTHING;
    while (outcome == PHOS_WAITING) outcome = wait(ticket, 1000, phos_why_buffer(), PHOS_WHY_BYTES);
    leave(ticket);
    return outcome;
}

/* Save the program, and wait until the image is complete: PHOS_SAVED, or in the restored program
 * PHOS_RESTORED; PHOS_NOTHING or PHOS_FAILED if there is none. Threads that ask at the same time
 * share an image. `then` is an enum phos_then. */
static inline int phos_checkpoint(int then) {
    return phos_wait_as(PHOS_ASKS, then, NULL);
}

/* The same, and the image is called `name`, under the rules of `phos run --name`, whose name an
 * image has otherwise. Only threads that ask for the same name share an image. */
static inline int phos_checkpoint_named(int then, const char* name) {
    return phos_wait_as(PHOS_ASKS, then, name);
}

/* Whether phosd waits for a safe point. The first call says that the program has them: from then on
 * checkpoints, migrations and suspensions wait for one. It costs next to nothing. */
static inline int phos_wanted(void) {
    static phos_program_wanted_t* wanted;
    static int looked;
    if (!__atomic_load_n(&looked, __ATOMIC_ACQUIRE)) {
        phos_program_wanted_t* found;
        *(void**)&found = phos_function("phos_program_wanted");
        __atomic_store_n(&wanted, found, __ATOMIC_RELAXED);
        __atomic_store_n(&looked, 1, __ATOMIC_RELEASE);
    }
    return __atomic_load_n(&wanted, __ATOMIC_RELAXED) ? wanted() : 0;
}

/* Be saved, moved or suspended here and now, if phosd waits for that: PHOS_STOPPED, PHOS_RESTORED
 * or PHOS_NOTHING. */
static inline int phos_safe_point(void) {
    return phos_wanted() ? phos_wait_as(PHOS_AT_SAFE_POINT, PHOS_RUN, NULL) : PHOS_NOTHING;
}

/* The program has no more safe points: nobody waits for one any more. */
static inline void phos_end_safe_points(void) {
    phos_program_declare_t* declare;
    *(void**)&declare = phos_function("phos_program_declare");
    if (declare) declare(0);
}

/* The file or folder at this absolute path belongs to the program, whether it is open or not:
 * images have its bytes, and a restore brings those back, as with `phos run --keep-files`, whose
 * patterns are possible, too. It is said for good, also in the restored program; neither the hook
 * nor a CUDA call is needed. Returns 0, or -1 with errno. */
static inline int phos_keep_files(const char* path) {
    /* phosd looks for this name among the program's open files; it reads names with their zeros. */
    int file = (int)syscall(SYS_memfd_create, "phos-keep-files", 1u /* MFD_CLOEXEC */);
    size_t size = strlen(path) + 1;
    return file < 0 || write(file, path, size) != (ssize_t)size ? -1 : 0;
}

#ifdef __cplusplus
}
#endif
#endif
