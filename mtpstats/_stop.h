/* One flag that asks a computation to stop. Read in the middle of it, once per step and on any
 * thread, so it must cost next to nothing. */
#ifndef MTP_STOP_H
#define MTP_STOP_H

#include <stdbool.h>

static volatile int mtp_stop_flag;

/* A callback of the form bool (*)(void *) that says true to stop. */
static bool mtp_stop_asked(void * unused) {
    (void) unused;
    return mtp_stop_flag != 0;
}

#endif
