// The option --phos=save|none of sbatch, salloc and srun: it is in the environment of what the job
// runs, where `phos run` looks for it. Slurm loads this library into its commands and slurmstepd by
// a line of plugstack.conf (docs/operate/slurm.md), and needs no more of it than this.

#include <cinttypes>
#include <csignal>
#include <cstdlib>
#include <cstring>

extern "C" {  // which the header leaves to us
#include <slurm/spank.h>
}

namespace {

constexpr const char* kVariable = "PHOS_SLURM";
// `phos run` sets it when it becomes a step (phosd/cli/slurm.py).
constexpr const char* kStepOfPhosRun = "PHOS_SLURM_OUTPUTS";
char g_wish[8] = "";

int take(int, const char* wish, int) {
    if (wish == nullptr || (std::strcmp(wish, "save") != 0 && std::strcmp(wish, "none") != 0)) {
        slurm_error("--phos=%s: the option is save or none; nothing was submitted",
                    wish == nullptr ? "" : wish);
        return ESPANK_BAD_ARG;
    }
    std::strcpy(g_wish, wish);
    return ESPANK_SUCCESS;
}

spank_option g_option = {
    const_cast<char*>("phos"),
    const_cast<char*>("save|none"),
    const_cast<char*>("have `phos run` save its program when the job is to end, and go on with it "
                      "when the job is requeued"),
    1,
    0,
    take,
};

}  // namespace

#define PHOS_EXPORTED extern "C" __attribute__((visibility("default")))

PHOS_EXPORTED const char plugin_name[] = "phos";
PHOS_EXPORTED const char plugin_type[] = "spank";
PHOS_EXPORTED const unsigned int plugin_version = SLURM_VERSION_NUMBER;
PHOS_EXPORTED const unsigned int spank_plugin_version = 1;

PHOS_EXPORTED int slurm_spank_init(spank_t spank, int, char**) {
    const spank_context_t context = spank_context();
    if (context == S_CTX_SLURMD || context == S_CTX_JOB_SCRIPT) {
        return ESPANK_SUCCESS;  // nobody gives them options
    }
    return spank_option_register(spank, &g_option);
}

// In slurmstepd, for each task, in its process. Without the option the environment stays as it is:
// a job that was submitted in one with the variable has it, as it has all others.
PHOS_EXPORTED int slurm_spank_task_init(spank_t spank, int, char**) {
    char value[2];
    const spank_err_t found = spank_getenv(spank, kStepOfPhosRun, value, sizeof value);
    if (found == ESPANK_SUCCESS || found == ESPANK_NOSPACE) {
        // It takes SIGTERM from then on that it has handlers; before, it would end by it.
        sigset_t term;
        sigemptyset(&term);
        sigaddset(&term, SIGTERM);
        sigprocmask(SIG_BLOCK, &term, nullptr);
    }
    if (g_wish[0] == '\0') {
        return ESPANK_SUCCESS;
    }
    const spank_err_t done = spank_setenv(spank, kVariable, g_wish, 1);
    if (done != ESPANK_SUCCESS) {
        slurm_error("--phos=%s: %s cannot be set: %s; the job is as without the option", g_wish,
                    kVariable, spank_strerror(done));
    }
    return done;
}
