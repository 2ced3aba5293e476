// Prints which definition a library finds after its own: "first" or "second".
#include <stdio.h>

const char* (*next_definition(const char* name))(void);

int main(void) {
    for (int i = 0; i < 2; ++i) {
        const char* (*found)(void) = next_definition(i ? "cuOther" : "cudnnCreate");
        puts(found ? found() : "nothing");
    }
    return 0;
}
